"""Root mean square norm of rows, in one launch: what a stock model does in six passes over memory.

    n = x / sqrt(mean(x^2) + eps)                in FP32
    y = round(w * round(n))                      where the weight meets what is rounded already
    y = round(n * (w + offset))                  otherwise

Roundings are those of the stock forms; only the order of the mean's sum is its own. Knows rows and
a weight; which modules compute this is `models/norms`'s business.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from hotset.kernels.device import is_interpreted, round_to
from hotset.kernels.relaunch import Relaunch

# Elements of a program: eight a thread with four warps.
_TILE = 4096


@dataclass(frozen=True)
class NormForm:
    """How a norm is scaled.

    Attributes:
        eps: added to the mean of the squares.
        rounds_first: the weight meets the rounded norm.
        offset: added to the weight, 0 or 1.
    """

    eps: float
    rounds_first: bool = False
    offset: float = 0.0


def reference(x: torch.Tensor, weight_H: torch.Tensor | None, form: NormForm) -> torch.Tensor:
    """The specification, in plain torch; arguments as for `rms_norm`."""
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + form.eps)
    if weight_H is None:
        return n.to(x.dtype)
    if form.rounds_first:
        return weight_H * n.to(x.dtype)
    return (n * (weight_H.float() + form.offset)).to(x.dtype)


@triton.jit(do_not_specialize=["num_rows", "eps", "offset"])
def _rms_norm_kernel(
    x_NH,
    weight_H,
    y_NH,
    num_rows,
    eps,
    offset,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    dtype: tl.constexpr = y_NH.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (h < DIM)[None, :]
    at = row[:, None] * DIM + h[None, :]
    x = tl.load(x_NH + at, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    if HAS_WEIGHT:
        w = tl.load(weight_H + h, mask=h < DIM, other=0.0).to(tl.float32) + offset
        if ROUNDS_FIRST:
            y = round_to(y, dtype, INTERPRET).to(tl.float32)
        y = y * w[None, :]
    tl.store(y_NH + at, round_to(y, dtype, INTERPRET), mask=inside)


def rms_norm(x: torch.Tensor, weight_H: torch.Tensor | None, form: NormForm) -> torch.Tensor:
    """Norms the last dimension.

    Args:
        x: [..., H], any number of rows.
        weight_H: [H] in the dtype of `x`; `None` scales by nothing.
        form: of the norm.

    Returns:
        [..., H] in the dtype of `x`, contiguous. The bits of a row depend on the row alone.
    """
    assert weight_H is None or (weight_H.dtype == x.dtype and weight_H.is_contiguous())
    x = x.contiguous()
    y, dim = torch.empty_like(x), x.shape[-1]
    rows, run = _launches(dim, weight_H is not None, form.rounds_first)
    num_rows = x.numel() // dim
    tensors = (x, x if weight_H is None else weight_H, y)
    run((triton.cdiv(num_rows, rows),), tensors, (num_rows, float(form.eps), float(form.offset)))
    return y


@cache
def _launches(dim: int, has_weight: bool, rounds_first: bool) -> tuple[int, Relaunch]:
    """Rows of a program, and what launches it."""
    columns = triton.next_power_of_2(dim)
    rows = max(1, _TILE // columns)
    constants = {
        "DIM": dim,
        "COLUMNS": columns,
        "ROWS": rows,
        "HAS_WEIGHT": has_weight,
        "ROUNDS_FIRST": rounds_first,
        "INTERPRET": is_interpreted(_rms_norm_kernel),
        "num_warps": 4,
    }
    return rows, Relaunch(_rms_norm_kernel, constants)
