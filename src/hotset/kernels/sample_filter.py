"""Device functions of the filters: the lowest value that all of them keep, out of counted values.

Values are the 65,536 keys of 16-bit numbers (`sample_device`), counted by key in one row; counts
and weights are integers: no sum depends on its order. Formulas stand in `sample_reference`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from hotset.kernels.sample_device import WEIGHT_OF_0, from_key, score, weight

NUM_KEYS = 65536
KEYS_PER_BLOCK = 1024  # values looked at together
NUM_BLOCKS = tl.constexpr(NUM_KEYS // KEYS_PER_BLOCK)


@triton.jit
def _values(count_K, block, temperature, top_score, IS_BF16: tl.constexpr, BINS: tl.constexpr):
    """(key, count, weight) of a block of values, the highest first, each [BINS]."""
    key = block * BINS + (BINS - 1) - tl.arange(0, BINS)
    count = tl.load(count_K + key)
    gap = score(from_key(key, IS_BF16), temperature) - top_score
    # What does not occur may be infinite, or above the highest.
    return key, count, weight(tl.where(count > 0, gap, 0.0))


@triton.jit
def _floor(
    count_K, blocks, temperature, top_k, top_p, min_p, IS_BF16: tl.constexpr, BINS: tl.constexpr
):
    """Key of the lowest value that all filters keep; `blocks` has a bit for each that occurs."""
    floor = NUM_BLOCKS * BINS
    top_score = 0.0
    above = tl.full((), 0, tl.int64)
    total = tl.full((), 0, tl.int64)
    for i in range(NUM_BLOCKS):
        block = NUM_BLOCKS - 1 - i
        if ((blocks >> block) & 1 > 0) & (above < top_k):
            if above == 0:
                key = block * BINS + tl.arange(0, BINS)
                top = tl.max(tl.where(tl.load(count_K + key) > 0, key, 0), 0)
                top_score = score(from_key(top, IS_BF16), temperature)
            key, count, each = _values(count_K, block, temperature, top_score, IS_BF16, BINS)
            count = count.to(tl.int64)
            kept = (count > 0) & (above + tl.cumsum(count, 0) - count < top_k)
            total += tl.sum(tl.where(kept, count * each, 0), 0)
            floor = tl.minimum(floor, tl.min(tl.where(kept, key, NUM_BLOCKS * BINS), 0))
            above += tl.sum(count, 0)

    # `floor` is that of top-k now, and `total` the weight of what it keeps.
    in_k = floor
    floor = NUM_BLOCKS * BINS
    mass_above = tl.full((), 0, tl.int64)
    enough = tl.where(top_p < 1.0, top_p.to(tl.float64) * total.to(tl.float64), float("inf"))
    least = min_p.to(tl.float64) * WEIGHT_OF_0
    for i in range(NUM_BLOCKS):
        block = NUM_BLOCKS - 1 - i
        if ((blocks >> block) & 1 > 0) & (mass_above.to(tl.float64) < enough):
            key, count, each = _values(count_K, block, temperature, top_score, IS_BF16, BINS)
            mass = tl.where(key >= in_k, count.to(tl.int64) * each, 0)
            before = mass_above + tl.cumsum(mass, 0) - mass
            kept = (count > 0) & (key >= in_k) & (before.to(tl.float64) < enough)
            kept &= each.to(tl.float64) >= least
            floor = tl.minimum(floor, tl.min(tl.where(kept, key, NUM_BLOCKS * BINS), 0))
            mass_above += tl.sum(mass, 0)
    return floor


@triton.jit
def _occurring_blocks(used_K):
    """One bit for each block of values that occur."""
    blocks = tl.arange(0, NUM_BLOCKS)
    used = tl.load(used_K + blocks) > 0
    return tl.sum(tl.where(used, tl.full((), 1, tl.int64) << blocks.to(tl.int64), 0), 0)


@triton.jit
def _clear(count_K, used_K, occurring, BINS: tl.constexpr):
    """Zeros what was counted, for the next call."""
    for block in range(NUM_BLOCKS):
        if (occurring >> block) & 1 > 0:
            tl.store(count_K + block * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
    tl.store(used_K + tl.arange(0, NUM_BLOCKS), tl.zeros((NUM_BLOCKS,), tl.int32))


@triton.jit
def take_floor(
    count_K,
    used_K,
    finite,
    temperature,
    top_k,
    top_p,
    min_p,
    IS_BF16: tl.constexpr,
    BINS: tl.constexpr,
):
    """The lowest key that all filters keep (0 where the row is not finite); counts are 0 then."""
    occurring = _occurring_blocks(used_K)
    floor = 0
    if finite:
        floor = _floor(count_K, occurring, temperature, top_k, top_p, min_p, IS_BF16, BINS)
    tl.debug_barrier()  # all have read before any clears
    _clear(count_K, used_K, occurring, BINS)
    return floor
