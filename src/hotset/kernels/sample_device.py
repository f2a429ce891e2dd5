"""Device functions of sampling: scores, weights and noise, bit for bit those of `sample_reference`.

The same FP32 operations in the same order. Kernels that use them are launched without fused
multiply-add, which would round once where the specification rounds twice. Formulas and sources
stand there; here are only their words in Triton.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from hotset.kernels import sample_reference as spec
from hotset.kernels.device import round_to

WEIGHT_BITS = tl.constexpr(spec.WEIGHT_BITS)
WEIGHT_OF_0 = tl.constexpr(2.0**spec.WEIGHT_BITS)
MIN_TEMPERATURE = tl.constexpr(spec.MIN_TEMPERATURE)
MAX_SCORE = tl.constexpr(spec.MAX_SCORE)
MIN_EXPONENT = tl.constexpr(spec.MIN_EXPONENT)
LOG2_E = tl.constexpr(spec.LOG2_E)
LN2_HIGH = tl.constexpr(spec.LN2_HIGH)
LN2_LOW = tl.constexpr(spec.LN2_LOW)
SQRT_2 = tl.constexpr(spec.SQRT_2)


@triton.jit
def to_key(bits):
    """16 bits of a finite half or bfloat16 number to 0..65535 in its order; -0 and 0 are one."""
    bits = bits.to(tl.int32) & 0xFFFF
    bits = tl.where(bits == 0x8000, 0, bits)
    return tl.where(bits < 0x8000, bits + 0x8000, 0xFFFF - bits)


@triton.jit
def from_key(key, IS_BF16: tl.constexpr):
    """The number of a key, FP32."""
    bits = tl.where(key < 0x8000, 0xFFFF - key, key - 0x8000)
    if IS_BF16:
        x = (bits << 16).to(tl.float32, bitcast=True)
    else:
        x = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def round_to_key(x, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr):
    """The key of an FP32 number as rounded to bfloat16 or half, to nearest even."""
    if IS_BF16:
        rounded = round_to(x, tl.bfloat16, INTERPRET).to(tl.int16, bitcast=True)
    else:
        rounded = x.to(tl.float16).to(tl.int16, bitcast=True)
    return to_key(rounded)


@triton.jit
def is_finite(x):
    """Whether an FP32 number is finite."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def score(x, temperature):
    """`scores`; x itself where the temperature is 0."""
    s = tl.div_rn(x, tl.maximum(temperature, MIN_TEMPERATURE) + tl.zeros_like(x))
    s = tl.minimum(tl.maximum(s, -MAX_SCORE), MAX_SCORE)
    return tl.where(temperature > 0, s, x)


@triton.jit
def weight(x):
    """`weights`."""
    x = tl.maximum(x, MIN_EXPONENT)
    n = tl.floor(x * LOG2_E + 0.5)
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * r * r + r
    p = p + 1.0
    whole = (p * 16777216.0).to(tl.int64)
    return (whole << (WEIGHT_BITS - 24)) >> (-n).to(tl.int64)


@triton.jit
def noise(seed, position, token):
    """`gumbel` of the first word of Philox for these tokens."""
    none = tl.zeros_like(token)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(
        seed,
        token.to(tl.uint32),
        none.to(tl.uint32) + low,
        none.to(tl.uint32) + high,
        none.to(tl.uint32),
    )
    word = word.to(tl.int64)
    odd = 2 * word + 1
    near_one = word < 1073741824  # 2^30
    step = 1.1641532182693481e-10  # 2^-33
    power, rest = _split((8589934592 - odd).to(tl.float32) * step)
    rest = tl.where(near_one, odd.to(tl.float32) * -step, rest)
    power, rest = _split(-_log(tl.where(near_one, 0.0, power), rest))
    return -_log(power, rest)


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True)
    power = (bits >> 23) - 127
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    high = fraction > SQRT_2
    fraction = tl.where(high, fraction * 0.5, fraction)
    return (power + high.to(tl.int32)).to(tl.float32), fraction - 1.0


@triton.jit
def _log(power, f):
    z = f * f
    p = f * 7.0376836292e-2 - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    p = p * f * z
    p = p + power * LN2_LOW
    p = p - z * 0.5
    return power * LN2_HIGH + (f + p)


@triton.jit
def pack(drawn, token):
    """One int64 whose order is that of (drawn, -token): the best, the lowest id among equals."""
    bits = drawn.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (order << 32) | (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def unpack_token(packed):
    return 0xFFFFFFFF - (packed & 0xFFFFFFFF)


@triton.jit
def unpack_score(packed):
    order = (packed >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
