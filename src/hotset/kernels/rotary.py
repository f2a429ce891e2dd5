"""Rotary position embedding of queries and keys in one launch each: what stock models do in five.

    y_a = x_a cos_a - x_b sin_a
    y_b = x_b cos_b + x_a sin_b        for each pair (a, b) of the R elements that are rotated

The other elements of a head pass as they are. Products and sums are rounded where the stock code
rounds them, so the bits are its own. Formula: Su et al., RoFormer. Knows heads and angles; which
function computes this is `models/rotary`'s business.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import triton
import triton.language as tl

from hotset.kernels.device import is_interpreted, round_to
from hotset.kernels.relaunch import Relaunch, row_stride

# Elements of a program: 32 a thread with four warps.
_TILE = 4096

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Where a pair lies among R elements: at j and R/2 + j, or at 2j and 2j + 1.
Pairs = Literal["halves", "neighbours"]


@dataclass(frozen=True)
class RotaryForm:
    """How a head is rotated.

    Attributes:
        source: pairs of what comes in.
        target: pairs of what goes out.
        angles: columns of a pair; `first` takes the first half of R columns for both elements,
            `single` has R/2 columns.
        wide: FP32 throughout, rounded once. Otherwise each product and each sum is rounded.
    """

    source: Pairs = "halves"
    target: Pairs = "halves"
    angles: Literal["halves", "neighbours", "first", "single"] = "halves"
    wide: bool = False

    def rotary_dim(self, num_columns: int) -> int:
        """R, where cosines have so many columns."""
        return 2 * num_columns if self.angles == "single" else num_columns


def reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: RotaryForm
) -> torch.Tensor:
    """The specification, in plain torch.

    Args:
        x: [..., D].
        cos, sin: [..., columns], of the same leading dimensions or of 1 there.

    Returns:
        [..., D] in the dtype of `x`.
    """
    dim = form.rotary_dim(cos.shape[-1])
    a, b = _split(x[..., :dim], form.source)
    (cos_a, cos_b), (sin_a, sin_b) = (_angles(angle, form) for angle in (cos, sin))
    if form.wide:
        a, b = a.float(), b.float()
    turned = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    joined = (
        torch.cat(turned, -1) if form.target == "halves" else torch.stack(turned, -1).flatten(-2)
    )
    return torch.cat((joined.to(x.dtype), x[..., dim:]), dim=-1)


def _split(x: torch.Tensor, pairs: str) -> tuple[torch.Tensor, torch.Tensor]:
    if pairs == "neighbours":
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _angles(angle: torch.Tensor, form: RotaryForm) -> tuple[torch.Tensor, torch.Tensor]:
    if form.angles == "single":
        return angle, angle
    first, second = _split(angle, form.angles)
    return (first, first) if form.angles == "first" else (first, second)


@triton.jit
def _load_pairs(x, c, inside, HALF: tl.constexpr, SOURCE: tl.constexpr):
    """Both elements of each pair, FP32.

    Args:
        x: [TOKENS, HEADS, 1] pointers to where heads begin.
        c: [1, 1, COLUMNS].
    """
    if SOURCE == "neighbours":
        # Side by side in memory, so they are read so.
        c2 = tl.arange(0, 2 * c.shape[2])[None, None, :]
        both = tl.load(x + c2, mask=inside & (c2 < 2 * HALF), other=0.0)
        a, b = tl.split(tl.reshape(both, [x.shape[0], x.shape[1], c.shape[2], 2]))
    else:
        a = tl.load(x + c, mask=inside & (c < HALF), other=0.0)
        b = tl.load(x + HALF + c, mask=inside & (c < HALF), other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _load_angles(angle, c, inside, HALF: tl.constexpr, ANGLES: tl.constexpr):
    """Cosines or sines of both elements of each pair, FP32; `angle` are pointers to rows."""
    real = inside & (c < HALF)
    step: tl.constexpr = 2 if ANGLES == "neighbours" else 1
    first = tl.load(angle + c * step, mask=real, other=0.0).to(tl.float32)
    second = first
    if ANGLES == "halves":
        second = tl.load(angle + HALF + c, mask=real, other=0.0).to(tl.float32)
    elif ANGLES == "neighbours":
        second = tl.load(angle + 2 * c + 1, mask=real, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _kept(x, DTYPE: tl.constexpr, WIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """A product as the sum meets it."""
    if not WIDE:
        x = round_to(x, DTYPE, INTERPRET).to(tl.float32)
    return x


@triton.jit
def _rotary_kernel(
    x,
    y,
    cos,
    sin,
    num_tokens,
    x_row,
    x_token,
    x_head,
    y_row,
    y_token,
    y_head,
    cos_row,
    cos_token,
    sin_row,
    sin_token,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    PASSED: tl.constexpr,
    PASSED_COLUMNS: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    ANGLES: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Some heads of some tokens, [TOKENS, HEADS, D]; their angles are read once."""
    dtype: tl.constexpr = y.dtype.element_ty
    groups: tl.constexpr = NUM_HEADS // HEADS
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t = ((block // groups).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    h = (block % groups * HEADS + tl.arange(0, HEADS))[None, :, None]
    c, inside = tl.arange(0, COLUMNS)[None, None, :], t < num_tokens
    x += row * x_row + t * x_token + h * x_head
    y += row * y_row + t * y_token + h * y_head
    a, b = _load_pairs(x, c, inside, HALF, SOURCE)
    cos_a, cos_b = _load_angles(cos + row * cos_row + t * cos_token, c, inside, HALF, ANGLES)
    sin_a, sin_b = _load_angles(sin + row * sin_row + t * sin_token, c, inside, HALF, ANGLES)
    y_a = _kept(a * cos_a, dtype, WIDE, INTERPRET) - _kept(b * sin_a, dtype, WIDE, INTERPRET)
    y_b = _kept(b * cos_b, dtype, WIDE, INTERPRET) + _kept(a * sin_b, dtype, WIDE, INTERPRET)
    y_a, y_b = round_to(y_a, dtype, INTERPRET), round_to(y_b, dtype, INTERPRET)
    if TARGET == "neighbours":
        c2 = tl.arange(0, 2 * COLUMNS)[None, None, :]
        tl.store(y + c2, tl.interleave(y_a, y_b), mask=inside & (c2 < 2 * HALF))
    else:
        tl.store(y + c, y_a, mask=inside & (c < HALF))
        tl.store(y + HALF + c, y_b, mask=inside & (c < HALF))
    if PASSED > 0:
        p = tl.arange(0, PASSED_COLUMNS)[None, None, :] + 2 * HALF
        real = inside & (p < 2 * HALF + PASSED)
        tl.store(y + p, tl.load(x + p, mask=real), mask=real)


def accepts(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: RotaryForm, *, heads_at: int
) -> bool:
    """Whether `rotate` takes these, by shapes, strides and dtypes alone."""
    tensors = (x, cos, sin)
    if x.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or heads_at not in (1, 2):
        return False
    if cos.dtype != sin.dtype or any(tensor.stride(-1) != 1 for tensor in tensors):
        return False
    batch, num_tokens = x.shape[0], x.shape[3 - heads_at]
    return (
        x.numel() > 0
        and (form.wide or cos.dtype == x.dtype)
        and cos.shape[0] in (1, batch)
        and cos.shape[1] == num_tokens
        and form.rotary_dim(cos.shape[2]) <= x.shape[3]
        and all(tensor.dtype in _DTYPES for tensor in tensors)
    )


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: RotaryForm, *, heads_at: int
) -> torch.Tensor:
    """Rotates every head; arguments that `accepts` accepts.

    Args:
        x: [B, heads, T, D], or [B, T, heads, D] where `heads_at` is 2.
        cos, sin: [B or 1, T, columns].
        form: of the rotation.

    Returns:
        Like `x`, in the order in which `x` lies in memory.
    """
    y = torch.empty_like(x)
    batch, num_heads, num_tokens, dim = x.shape if heads_at == 1 else x.transpose(1, 2).shape
    groups, tokens, run = _launches(num_heads, dim, form.rotary_dim(cos.shape[2]), form)
    cos, sin = (angle.expand(batch, -1, -1) for angle in (cos, sin))
    order = (0, 3 - heads_at, heads_at)
    strides = [row_stride(tensor, axis) for tensor in (x, y) for axis in order]
    strides += [row_stride(angle, axis) for angle in (cos, sin) for axis in (0, 1)]
    grid = (triton.cdiv(num_tokens, tokens) * groups, batch)
    run(grid, (x, y, cos, sin), (num_tokens, *strides))
    return y


@cache
def _launches(
    num_heads: int, dim: int, rotary_dim: int, form: RotaryForm
) -> tuple[int, int, Relaunch]:
    """Groups of heads, tokens of a program, and what launches it."""
    columns = triton.next_power_of_2(rotary_dim // 2)
    # Heads in a power of two that leaves no rest, tokens in what is left of a tile.
    heads = min(num_heads & -num_heads, max(1, _TILE // (2 * columns)))
    tokens = max(1, _TILE // (2 * columns * heads))
    constants = {
        "NUM_HEADS": num_heads,
        "HEADS": heads,
        "TOKENS": tokens,
        "HALF": rotary_dim // 2,
        "COLUMNS": columns,
        "PASSED": dim - rotary_dim,
        "PASSED_COLUMNS": triton.next_power_of_2(max(1, dim - rotary_dim)),
        "SOURCE": form.source,
        "TARGET": form.target,
        "ANGLES": form.angles,
        "WIDE": form.wide,
        "INTERPRET": is_interpreted(_rotary_kernel),
        "num_warps": 4,
        "enable_fp_fusion": False,  # bits of the specification
    }
    return num_heads // heads, tokens, Relaunch(_rotary_kernel, constants)
