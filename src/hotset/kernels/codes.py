"""Device functions from codes to numbers: one code, or two weights of a word at once.

The formulas are those of `dequantise`, bit for bit: products in FP32, each weight rounded once to
the compute dtype, or in BF16 where that is the same. No FP8 or FP4 type of the hardware is used,
so every card gives the same bits. Knows registers; nothing of records or tiles.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from hotset.kernels.device import round_to


@triton.jit
def decode_e4m3(code):
    """E4M3FN bits (uint8) to FP32, exact for every code."""
    bits = code.to(tl.int32)
    magnitude = bits & 0x7F
    value = (((bits & 0x80) << 24) | (magnitude << 20)).to(tl.float32, bitcast=True)
    return tl.where(magnitude == 0x7F, float("nan"), value * 1.329227995784916e36)  # 2^120


@triton.jit
def decode_e8m0(code):
    """E8M0 bits (uint8) to FP32, exact for every code; 2^-127 is subnormal."""
    bits = code.to(tl.int32)
    value = tl.where(bits == 0, 0x00400000, bits << 23)
    return tl.where(bits == 255, 0x7FC00000, value).to(tl.float32, bitcast=True)


@triton.jit
def _split_halves(pair):
    """Two numbers, in the upper 16 bits of FP32 each, that share a word: (low half, high half)."""
    low = (pair << 16).to(tl.float32, bitcast=True)
    return low, (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _placed(word, J: tl.constexpr, CODES: tl.constexpr):
    """Codes J and J + half as many as a word has of each word, as two BF16 numbers in a word.

    Sign, exponent and mantissa lie where BF16 has them, so the numbers are 2^-120 (`fp8`) or
    2^-126 (`fp4`) of what they mean, subnormal ones included; NaN of `fp8` is 480 of them.
    """
    if CODES == "fp8":
        sign = word << (8 - 8 * J)
        magnitude = word << 4 if J == 0 else word >> 4
        pair = (sign & -2147450880) | (magnitude & 0x07F007F0)
    else:
        sign = word << (12 - 4 * J)
        magnitude = word << (6 - 4 * J) if J < 2 else word >> (4 * J - 6)
        pair = (sign & -2147450880) | (magnitude & 0x01C001C0)
    return pair


@triton.jit
def code_values(word, zero, J: tl.constexpr, CODES: tl.constexpr):
    """FP32 values of two codes of each word, J and J + half as many as a word has.

    The two are 16 bits apart, so that one shift and one mask bring both to their place. `zero` is
    the zero point of `int4`.
    """
    if CODES == "fp8":
        low, high = _split_halves(_placed(word, J, CODES))
        low, high = low * 1.329227995784916e36, high * 1.329227995784916e36  # 2^120
        # 480 is what the bits of NaN would be.
        low = tl.where(tl.abs(low) == 480.0, float("nan"), low)
        high = tl.where(tl.abs(high) == 480.0, float("nan"), high)
    elif CODES == "fp4":
        low, high = _split_halves(_placed(word, J, CODES))
        low, high = low * 8.507059173023462e37, high * 8.507059173023462e37  # 2^126
    else:
        # As mantissa of 2^23 a code needs no conversion, which would run at a quarter of the rate,
        # and no shift. All of this is exact.
        low = ((word & (0xF << 4 * J)) | 0x4B000000).to(tl.float32, bitcast=True)
        high = (((word >> 16) & (0xF << 4 * J)) | 0x4B000000).to(tl.float32, bitcast=True)
        unit: tl.constexpr = 1.0 / (1 << 4 * J)
        base = 8388608.0 * unit + zero
        low, high = low * unit - base, high * unit - base
    return low, high


@triton.jit
def _halves(pair):
    """Two BF16 numbers that share a word: (low half, high half)."""
    low = pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _twice(x):
    """FP32 numbers that BF16 holds, as two equal BF16 in a word."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits & -65536) | ((bits >> 16) & 0xFFFF)


# Products of two pairs are sums with -0, which older cards have and which keeps the sign of zero.


@triton.jit
def _int4_pair(word, base):
    """Codes at the low end of each half less their zero point. As mantissa of 2^7 a code is BF16.

    Args:
        base: -128 - zero, twice.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 code, one;
        mov.b32 one, 0x3F803F80;
        lop3.b32 code, $1, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, code, one, $2;
        }""",
        "=r,r,r",
        [word, base],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _times(pair, factor):
    """Products of BF16 pairs, each rounded once; subnormal numbers are kept."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 none;
        mov.b32 none, 0x80008000;
        fma.rn.bf16x2 $0, $1, $2, none;
        }""",
        "=r,r,r",
        [pair, factor],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _with_nan(pair):
    """E4M3 values, in which 480 is NaN: 1.0703125 * 2^119 of it is infinite, and of 448, which is
    the largest number, is not. That times 0 is NaN or 0, and is added."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 check, edge, zero, none;
        mov.b32 edge, 0x7B097B09;
        mov.b32 zero, 0;
        mov.b32 none, 0x80008000;
        fma.rn.bf16x2 check, $1, edge, none;
        fma.rn.bf16x2 $0, check, zero, $1;
        }""",
        "=r,r",
        [pair],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _value_pair(word, base, J: tl.constexpr, CODES: tl.constexpr):
    """`code_values` as BF16 that share a word, two an instruction. All of them are BF16 numbers."""
    if CODES == "int4":
        pair = _int4_pair(word >> 4 * J, base)
    elif CODES == "fp4":
        pair = _times(_placed(word, J, CODES), 0x7E807E80)  # 2^126
    else:
        pair = _with_nan(_times(_placed(word, J, CODES), 0x7B807B80))  # 2^120
    return pair


@triton.jit
def _rounded_pair(low, high):
    """FP32 rounded to BF16, two in one instruction; by itself the compiler takes one each."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [low, high],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def pair_factors(scale, zero, EXACT: tl.constexpr, INTERPRET: tl.constexpr):
    """FP32 scales and zero points as `weights_of_pair` takes them."""
    if not INTERPRET:
        zero = _twice(-128.0 - zero)
        if EXACT:
            scale = _twice(scale)
    return scale, zero


@triton.jit
def weights_of_pair(
    word,
    scale,
    zero,
    J: tl.constexpr,
    CODES: tl.constexpr,
    EXACT: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Weights of two codes of each word (see `code_values`), rounded once to `DTYPE`.

    Args:
        scale, zero: of each word; see `pair_factors`.
        EXACT: `DTYPE` and scales are BF16. FP32 holds every product exactly then, so that rounding
            it in BF16 is the same. The interpreter has no such arithmetic.
    """
    if INTERPRET:
        low, high = code_values(word, zero, J, CODES)
        low, high = low * scale, high * scale
        low, high = round_to(low, DTYPE, INTERPRET), round_to(high, DTYPE, INTERPRET)
    else:
        pair = _value_pair(word, zero, J, CODES)
        if EXACT:
            low, high = _halves(_times(pair, scale))
        else:
            low, high = _split_halves(pair)
            low, high = low * scale, high * scale
            if DTYPE == tl.bfloat16:  # noqa: SIM300
                low, high = _halves(_rounded_pair(low, high))
            else:
                low, high = low.to(DTYPE), high.to(DTYPE)
    return low, high
