"""Keys and values in eight bits: E4M3 codes, and a power of two for each token and head.

    2^e    the least power of two with max |x| <= 448 * 2^e over the row of one head
    code   E4M3 of x / 2^e, to nearest even
    value  E4M3(code) * 2^e, exact in BF16 and in FP32

The power is kept as E8M0 (e + 127), a byte beside the D codes of a row. Since codes have exponents
of their own, a power of two loses nothing against other scales. What is no number becomes NaN.
Knows rows of heads; nothing of blocks and positions.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotset.kernels import dequantise as decoded
from hotset.kernels.codes import decode_e4m3, decode_e8m0

E4M3_NAN = 0x7F

# 448 is 1.75 * 2^8: these are the bits of that significand, and how far exponents are apart.
_MOST_SIGNIFICAND, _MOST_EXPONENT = tl.constexpr(0x600000), tl.constexpr(8)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in plain torch.

    Args:
        x: [..., D], rows of one head each.

    Returns:
        Codes, uint8 [..., D], and E8M0 exponents, uint8 [...].
    """
    most = x.float().abs().nan_to_num(0.0, posinf=torch.inf).amax(dim=-1)
    bits = most.view(torch.int32)
    beyond = (bits & 0x7FFFFF) > _MOST_SIGNIFICAND.value
    exponents = ((bits >> 23) + beyond - _MOST_EXPONENT.value).clamp(1, 254).to(torch.uint8)
    scaled = x.float() / decoded.decode_e8m0(exponents)[..., None]
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(~scaled.isfinite(), E4M3_NAN), exponents


def dequantise(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., D] in `dtype`; the inverse of `quantise`."""
    # Codes and powers are exact in BF16 as well, and so is their product.
    exact = dtype if dtype == torch.bfloat16 else torch.float32
    values = codes.view(torch.float8_e4m3fn).to(exact)
    return values.mul_(decoded.decode_e8m0(exponents).to(exact)[..., None]).to(dtype)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What `x` [..., D] is once it has been kept, in its dtype."""
    return dequantise(*quantise(x), x.dtype)


@triton.jit
def encode_rows(x):
    """(codes uint8 [R, D], exponents uint8 [R]) of rows of FP32."""
    sizes = tl.where(x == x, tl.abs(x), 0.0)  # noqa: PLR0124 (NaN is not equal to itself)
    bits = tl.max(sizes, 1).to(tl.int32, bitcast=True)
    beyond = (bits & 0x7FFFFF) > _MOST_SIGNIFICAND
    exponents = (bits >> 23) + beyond.to(tl.int32) - _MOST_EXPONENT
    exponents = tl.minimum(tl.maximum(exponents, 1), 254)
    # 1 / 2^e has the exponent 254 - (e + 127) of FP32, and none where that is 0.
    y = x * (0x7F000000 - (exponents << 23)).to(tl.float32, bitcast=True)[:, None]
    return _encode_e4m3(y), exponents.to(tl.uint8)


@triton.jit
def _encode_e4m3(y):
    """FP32 to E4M3FN bits, to nearest even; NaN for what is beyond 448."""
    bits = y.to(tl.int32, bitcast=True)
    size = tl.abs(y)
    magnitude = bits & 0x7FFFFFFF
    # Three bits of the significand stay; the exponent's bias becomes 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 codes are multiples of 2^-9; beside 2^23 there is room for whole numbers only.
    small = tl.where(size < 0.015625, size, 0.0)
    whole = (small * 512.0 + 8388608.0) - 8388608.0
    code = tl.where(size < 0.015625, whole.to(tl.int32), normal)
    code |= (bits >> 24) & 0x80
    return tl.where(size <= 448.0, code, 0x7F).to(tl.uint8)


@triton.jit
def decode_rows(codes, exponents, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """Values [R, D] of codes and their rows' exponents [R]; DTYPE is BF16, FP16 or FP32."""
    values = decode_e4m3(codes) * decode_e8m0(exponents)[:, None]
    return values.to(DTYPE)
