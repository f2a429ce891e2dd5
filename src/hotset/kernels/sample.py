"""Sampling on the device in two launches: a token for each row of logits, nothing for the host.

The specification, formulas included, is `sample_reference`; tokens are equal to its tokens. The
three filters each keep the scores above a threshold, and BF16 or FP16 logits take at most 65,536
values, so no sorting is needed:

    1  many programs: noise for all tokens, the best token of each 1024; how many tokens have each
       value (rows with filters)
    2  one program a row: walks down the values that occur, with count and weight above each, to
       the lowest that all filters keep. Mostly the best token of all is above it. Otherwise the
       blocks whose best was dropped, and still beats the best that was kept, are drawn anew
       without what is dropped: (1 - m) / m of them where the kept tokens have probability m.

Counts and weights are integers: no sum depends on its order, no row on its neighbours. FP32 logits,
which take too many values, go through the specification. Never waits for the device.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hotset.kernels import sample_reference
from hotset.kernels.sample_device import (
    WEIGHT_OF_0,
    from_key,
    noise,
    pack,
    score,
    to_key,
    unpack_token,
    weight,
)
from hotset.kernels.sample_reference import SampleParams

_CHUNK = 1024  # tokens of a program
_BINS = 1024  # values looked at together
_NUM_KEYS = 65536
_NUM_BLOCKS = _NUM_KEYS // _BINS

# What a row without an answer gives: token 0, and larger than any other.
NOT_FINITE = tl.constexpr(2**63 - 1)
NOTHING = tl.constexpr(-(2**63))
NUM_BLOCKS = tl.constexpr(_NUM_BLOCKS)


@dataclass(frozen=True)
class SampleBuffers:
    """Device memory of `sample` for up to B rows of V logits, at fixed addresses.

    Attributes:
        token_B: int64, out.
        finite_B: bool, out.
        best_BC: int64, best token of each chunk.
        count_BK: int32, tokens of each value; all 0 between calls.
        used_BK: int32, which blocks of values occur; all 0 between calls.
    """

    token_B: torch.Tensor
    finite_B: torch.Tensor
    best_BC: torch.Tensor
    count_BK: torch.Tensor
    used_BK: torch.Tensor

    @classmethod
    def make(cls, num_rows: int, vocab: int, *, device: torch.device) -> SampleBuffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_B=zeros(num_rows, dtype=torch.int64),
            finite_B=zeros(num_rows, dtype=torch.bool),
            best_BC=zeros(num_rows, triton.cdiv(vocab, _CHUNK), dtype=torch.int64),
            count_BK=zeros(num_rows, _NUM_KEYS),
            used_BK=zeros(num_rows, _NUM_BLOCKS),
        )


@triton.jit
def _load_params(temperature_B, top_k_B, top_p_B, min_p_B, row):
    """(temperature, k, p, min p, whether any filter does something)."""
    temperature = tl.load(temperature_B + row)
    top_k = tl.load(top_k_B + row)
    top_p = tl.load(top_p_B + row)
    min_p = tl.load(min_p_B + row)
    top_k = tl.where(top_k > 0, top_k, 0x7FFFFFFF)
    filters = (top_k < 0x7FFFFFFF) | (top_p < 1.0) | (min_p > 0.0)
    return temperature, top_k, top_p, min_p, filters & (temperature > 0)


@triton.jit
def _draw(bits, token, live, floor, temperature, seed, position, IS_BF16: tl.constexpr):
    """The best of these tokens with keys from `floor` on, packed; `NOTHING` if there is none."""
    key = to_key(bits)
    drawn = score(from_key(key, IS_BF16), temperature)
    if temperature > 0:
        drawn += noise(seed, position, token)
    return tl.max(tl.where(live & (key >= floor), pack(drawn, token), NOTHING), 0)


@triton.jit
def _is_finite(bits, IS_BF16: tl.constexpr):
    exponent: tl.constexpr = 0x7F80 if IS_BF16 else 0x7C00
    return (bits.to(tl.int32) & exponent) != exponent


@triton.jit
def _draw_kernel(
    bits_BV,
    temperature_B,
    top_k_B,
    top_p_B,
    min_p_B,
    seed_B,
    position_B,
    best_BC,
    count_BK,
    used_BK,
    vocab,
    row_stride,
    IS_BF16: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    live = token < vocab
    bits = tl.load(bits_BV + row * row_stride + token, mask=live, other=0)
    params = _load_params(temperature_B, top_k_B, top_p_B, min_p_B, row)
    temperature, filters = params[0], params[4]
    seed, position = tl.load(seed_B + row), tl.load(position_B + row)

    finite = _is_finite(bits, IS_BF16)
    best = _draw(bits, token, live & finite, 0, temperature, seed, position, IS_BF16)
    broken = tl.max((live & (finite == 0)).to(tl.int32), 0) > 0
    tl.store(best_BC + row * tl.num_programs(1) + chunk, tl.where(broken, NOT_FINITE, best))
    if filters:
        key = to_key(bits)
        counted = live & finite
        ones = tl.full((CHUNK,), 1, tl.int32)
        tl.atomic_add(count_BK + row * (NUM_BLOCKS * BINS) + key, ones, mask=counted, sem="relaxed")
        tl.store(used_BK + row * NUM_BLOCKS + key // BINS, ones, mask=counted)


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
def _choose_kernel(
    bits_BV,
    temperature_B,
    top_k_B,
    top_p_B,
    min_p_B,
    seed_B,
    position_B,
    best_BC,
    count_BK,
    used_BK,
    token_B,
    finite_B,
    vocab,
    row_stride,
    num_chunks,
    IS_BF16: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    bits_V, count_K = bits_BV + row * row_stride, count_BK + row * (NUM_BLOCKS * BINS)
    temperature, top_k, top_p, min_p, filters = _load_params(
        temperature_B, top_k_B, top_p_B, min_p_B, row
    )
    chunk = tl.arange(0, CHUNKS)
    best = tl.load(best_BC + row * num_chunks + chunk, mask=chunk < num_chunks, other=NOTHING)
    finite = tl.max(best, 0) < NOT_FINITE
    floor = 0
    if filters:
        blocks = tl.arange(0, NUM_BLOCKS)
        used = tl.load(used_BK + row * NUM_BLOCKS + blocks) > 0
        occurring = tl.sum(tl.where(used, tl.full((), 1, tl.int64) << blocks.to(tl.int64), 0), 0)
        if finite:
            floor = _floor(count_K, occurring, temperature, top_k, top_p, min_p, IS_BF16, BINS)
        tl.debug_barrier()  # all have read before any clears
        for block in range(NUM_BLOCKS):
            if (occurring >> block) & 1 > 0:
                tl.store(count_K + block * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
        tl.store(used_BK + row * NUM_BLOCKS + blocks, tl.zeros((NUM_BLOCKS,), tl.int32))

    token = unpack_token(best)
    key = to_key(tl.load(bits_V + token, mask=(chunk < num_chunks) & (token < vocab), other=0))
    answer = tl.max(tl.where(key >= floor, best, NOTHING), 0)
    dropped = tl.where(key >= floor, NOTHING, best)
    seed, position = tl.load(seed_B + row), tl.load(position_B + row)
    while tl.max(dropped, 0) > answer:
        first = unpack_token(tl.max(dropped, 0)) // CHUNK
        others = (first * CHUNK + tl.arange(0, CHUNK)).to(tl.int32)
        bits = tl.load(bits_V + others, mask=others < vocab, other=0)
        found = _draw(bits, others, others < vocab, floor, temperature, seed, position, IS_BF16)
        answer = tl.maximum(answer, found)
        dropped = tl.where(chunk == first, NOTHING, dropped)
    tl.store(token_B + row, tl.where(finite, unpack_token(answer), 0))
    tl.store(finite_B + row, finite)


def sample(
    logits_BV: torch.Tensor, params: SampleParams, *, buffers: SampleBuffers | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token for each row.

    Args:
        logits_BV: [B, V], any float dtype; rows may have any stride.
        params: of each row, in the same order; there may be more of them.
        buffers: for at least B rows of these V logits. Needed where the call is captured, for the
            results then lie at fixed addresses; made here otherwise.

    Returns:
        token_B int64: a token id, 0 for a row that is not finite. finite_B bool: whether all of
        the row's logits are finite. Those of `buffers` if given.
    """
    if logits_BV.is_cuda and logits_BV.dtype in (torch.bfloat16, torch.float16):
        return launch_sample(logits_BV, params, buffers=buffers)
    num_rows = len(logits_BV)
    token_B, finite_B = sample_reference.sample(logits_BV, params.rows(num_rows))
    if buffers is None:
        return token_B, finite_B
    return buffers.token_B[:num_rows].copy_(token_B), buffers.finite_B[:num_rows].copy_(finite_B)


def launch_sample(
    logits_BV: torch.Tensor, params: SampleParams, *, buffers: SampleBuffers | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` for BF16 and FP16 logits, by the kernels above."""
    num_rows, vocab = logits_BV.shape
    assert logits_BV.stride(1) == 1 and num_rows > 0
    out = buffers or SampleBuffers.make(num_rows, vocab, device=logits_BV.device)
    num_chunks = triton.cdiv(vocab, _CHUNK)
    assert len(out.token_B) >= num_rows and out.best_BC.shape[1] == num_chunks
    rows = params.rows(num_rows)
    shared = (
        logits_BV.view(torch.int16),
        rows.temperature_B,
        rows.top_k_B,
        rows.top_p_B,
        rows.min_p_B,
        rows.seed_B,
        rows.position_B,
        out.best_BC,
        out.count_BK,
        out.used_BK,
    )
    constants = {
        "IS_BF16": logits_BV.dtype == torch.bfloat16,
        "CHUNK": _CHUNK,
        "BINS": _BINS,
        "num_warps": 4,
        "enable_fp_fusion": False,  # bits of the specification, see `sample_device`
    }
    _draw_kernel[(num_rows, num_chunks)](*shared, vocab, logits_BV.stride(0), **constants)
    _choose_kernel[(num_rows,)](
        *shared,
        out.token_B,
        out.finite_B,
        vocab,
        logits_BV.stride(0),
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        **constants,
    )
    return out.token_B[:num_rows], out.finite_B[:num_rows]
