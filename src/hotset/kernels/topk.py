"""Top-k of short rows, as a router needs it: one launch, lowest index first among equals.

    topk           values and indices of the k largest, largest first
    softmax_topk   the same of a row's softmax in FP32; with `normalise` divided by their sum

The library's top-k takes two launches and 9 us for a row of 128 on an H200 (gather and sort), and
softmax, sum and division are launches of their own. Registered as operators, so that a compiled
graph can hold them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from hotset.kernels.dependent import dependent_launch, wait_for_previous
from hotset.kernels.device import is_interpreted, round_to
from hotset.kernels.relaunch import Relaunch

# One program holds a row in registers, and takes k passes over it.
MAX_COLUMNS = 1024
MAX_K = 64
_COLUMNS_OF_A_WARP = 256

# Keys below those of all numbers: of what is taken or not there, and of NaN.
_GONE = tl.constexpr(-(2**31))
_NAN = tl.constexpr(-(2**31) + 1)


@triton.jit
def _order(x):
    """int32 keys in the order of `x`, equal for equals: a warp reduces integers at once."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, key, _NAN)  # noqa: PLR0124


@triton.jit
def _topk_kernel(
    x_TE,
    values_TK,
    ids_TK,
    num_columns,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISE: tl.constexpr,
    INTERPRET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    real = column < num_columns
    x = tl.load(x_TE + row * num_columns + column, mask=real, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        e = tl.exp(x - tl.max(x, 0))
        x = tl.div_rn(e, tl.zeros_like(e) + tl.sum(e, 0))
    key = tl.where(real, _order(x), _GONE)
    place = tl.full((COLUMNS,), K, tl.int32)
    for k in range(K):
        best = tl.max(key, 0)
        index = tl.min(tl.where(key == best, column, COLUMNS), 0)
        place = tl.where(column == index, k, place)
        key = tl.where(column == index, _GONE, key)
    chosen = place < K
    if NORMALISE:
        x = tl.div_rn(x, tl.zeros_like(x) + tl.sum(tl.where(chosen, x, 0.0), 0))
    dtype: tl.constexpr = values_TK.dtype.element_ty
    tl.store(values_TK + row * K + place, round_to(x, dtype, INTERPRET), mask=chosen)
    tl.store(ids_TK + row * K + place, column.to(tl.int64), mask=chosen)


def topk_reference(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification: a stable descending sort, cut off after k."""
    values, ids = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), ids[..., :k].contiguous()


def softmax_topk_reference(
    x: torch.Tensor, k: int, *, normalise: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, as routers of the library write it."""
    values, ids = topk_reference(torch.softmax(x, dim=-1, dtype=torch.float32), k)
    if normalise:
        values = values / values.sum(dim=-1, keepdim=True)
    return values.to(dtype), ids


def accepts(num_columns: int, k: int, dtype: torch.dtype) -> bool:
    """Whether rows of this length and type are taken."""
    return (
        num_columns <= MAX_COLUMNS
        and 0 < k <= min(MAX_K, num_columns)
        and dtype.is_floating_point
        and dtype.itemsize <= 4
    )


def launch_topk(
    x: torch.Tensor,
    k: int,
    *,
    softmax: bool = False,
    normalise: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row and their indices, largest first.

    Args:
        x: [..., E] float, E at most `MAX_COLUMNS`.
        k: at most `MAX_K` and E.
        softmax: of the row's softmax in FP32, not of itself.
        normalise: values are divided by their sum.
        dtype: of the values; x's by default.

    Returns:
        values [..., k] and indices [..., k] int64.
    """
    x = x.contiguous()
    shape = (*x.shape[:-1], k)
    values = torch.empty(shape, dtype=x.dtype if dtype is None else dtype, device=x.device)
    ids = torch.empty(shape, dtype=torch.int64, device=x.device)
    num_columns = x.shape[-1]
    run = _launches(num_columns, k, softmax=softmax, normalise=normalise, device=x.device)
    run((x.numel() // num_columns,), (x, values, ids), (num_columns,))
    return values, ids


@cache
def _launches(
    num_columns: int, k: int, *, softmax: bool, normalise: bool, device: torch.device
) -> Relaunch:
    columns = triton.next_power_of_2(num_columns)
    constants = {
        "K": k,
        "COLUMNS": columns,
        "SOFTMAX": softmax,
        "NORMALISE": normalise,
        "INTERPRET": is_interpreted(_topk_kernel),
        "num_warps": 1 if columns <= _COLUMNS_OF_A_WARP else 4,
        **dependent_launch(device),
    }
    return Relaunch(_topk_kernel, constants)


@torch.library.custom_op("hotset::topk", mutates_args=())
def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`launch_topk` on CUDA, the reference elsewhere, as an operator."""
    return launch_topk(x, k) if x.is_cuda else topk_reference(x, k)


@topk.register_fake
def _(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("hotset::softmax_topk", mutates_args=())
def softmax_topk(
    x: torch.Tensor, k: int, normalise: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`launch_topk` of a row's softmax on CUDA, the reference elsewhere, as an operator."""
    if x.is_cuda:
        return launch_topk(x, k, softmax=True, normalise=normalise, dtype=dtype)
    return softmax_topk_reference(x, k, normalise=normalise, dtype=dtype)


@softmax_topk.register_fake
def _(
    x: torch.Tensor, k: int, normalise: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=torch.int64)
