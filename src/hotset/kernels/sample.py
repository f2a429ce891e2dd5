"""Sampling on the device in two launches: a token for each row of logits, nothing for the host.

The specification, formulas included, is `sample_reference`; tokens are equal to its tokens. The
three filters each keep the scores above a threshold, and BF16 or FP16 logits take at most 65,536
values, so no sorting is needed:

    1  many programs: noise for all tokens, the best token of each 1024; how many tokens have each
       value (rows with filters)
    2  one program a place: walks down the values that occur, with count and weight above each, to
       the lowest that all filters keep. Mostly the best token of all is above it. Otherwise the
       blocks whose best was dropped, and still beats the best that was kept, are drawn anew
       without what is dropped: (1 - m) / m of them where the kept tokens have probability m.

Counts and weights are integers: no sum depends on its order, no row on its neighbours. Adjusted
logits are FP32, and only for the filters rounded to one of the values. FP32 logits, which take too
many values, go through the specification. Never waits for the device.

Letters: B places of a step, R rows whose parameters are kept, V vocabulary, C chunks, K values.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hotset.kernels import sample_reference
from hotset.kernels.device import is_interpreted
from hotset.kernels.sample_device import (
    from_key,
    is_finite,
    noise,
    pack,
    round_to_key,
    score,
    to_key,
    unpack_token,
)
from hotset.kernels.sample_filter import (
    KEYS_PER_BLOCK,
    NUM_BLOCKS,
    NUM_KEYS,
    take_floor,
)
from hotset.kernels.sample_reference import Adjusted, SampleParams

_CHUNK = 1024  # tokens of a program

# What a row without an answer gives: token 0, and larger than any other.
NOT_FINITE = tl.constexpr(2**63 - 1)
NOTHING = tl.constexpr(-(2**63))


@dataclass(frozen=True)
class SampleBuffers:
    """Device memory of `sample` for up to B places of V logits, at fixed addresses.

    Attributes:
        places_B: int64, 0..B-1: the rows where they are not told.
        token_B: int64, out.
        finite_B: bool, out.
        best_BC: int64, best token of each chunk.
        count_BK: int32, tokens of each value; all 0 between calls.
        used_BK: int32, which blocks of values occur; all 0 between calls.
    """

    places_B: torch.Tensor
    token_B: torch.Tensor
    finite_B: torch.Tensor
    best_BC: torch.Tensor
    count_BK: torch.Tensor
    used_BK: torch.Tensor

    @classmethod
    def make(cls, num_places: int, vocab: int, *, device: torch.device) -> SampleBuffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            places_B=torch.arange(num_places, device=device),
            token_B=zeros(num_places, dtype=torch.int64),
            finite_B=zeros(num_places, dtype=torch.bool),
            best_BC=zeros(num_places, triton.cdiv(vocab, _CHUNK), dtype=torch.int64),
            count_BK=zeros(num_places, NUM_KEYS),
            used_BK=zeros(num_places, NUM_KEYS // KEYS_PER_BLOCK),
        )


@triton.jit
def _load_params(temperature_R, top_k_R, top_p_R, min_p_R, row):
    """(temperature, k, p, min p, whether any filter does something)."""
    temperature = tl.load(temperature_R + row)
    top_k = tl.load(top_k_R + row)
    top_p = tl.load(top_p_R + row)
    min_p = tl.load(min_p_R + row)
    top_k = tl.where(top_k > 0, top_k, 0x7FFFFFFF)
    filters = (top_k < 0x7FFFFFFF) | (top_p < 1.0) | (min_p > 0.0)
    return temperature, top_k, top_p, min_p, filters & (temperature > 0)


@triton.jit
def _load_logits(
    bits_V, adjusted_V, adjusted, token, live, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr
):
    """(x FP32, its key, whether it is finite, whether it is forbidden) of some tokens."""
    bits = tl.load(bits_V + token, mask=live, other=0)
    exponent: tl.constexpr = 0x7F80 if IS_BF16 else 0x7C00
    finite = (bits.to(tl.int32) & exponent) != exponent
    key = to_key(bits)
    x = from_key(key, IS_BF16)
    forbidden = live & False
    if adjusted:
        x = tl.load(adjusted_V + token, mask=live, other=0.0)
        x = tl.where(x == 0.0, 0.0, x)  # -0 and 0 are equals
        finite = is_finite(x)
        forbidden = live & (x == float("-inf"))
        key = round_to_key(x, IS_BF16, INTERPRET)
    return x, key, finite, forbidden


@triton.jit
def _draw(x, key, token, live, floor, temperature, seed, position):
    """The best of these tokens with keys from `floor` on, packed; `NOTHING` if there is none."""
    drawn = score(x, temperature)
    if temperature > 0:
        drawn += noise(seed, position, token)
    return tl.max(tl.where(live & (key >= floor), pack(drawn, token), NOTHING), 0)


@triton.jit
def _draw_kernel(
    bits_BV,
    temperature_R,
    top_k_R,
    top_p_R,
    min_p_R,
    seed_R,
    position_R,
    rows_B,
    is_on_R,
    adjusted_BV,
    best_BC,
    count_BK,
    used_BK,
    vocab,
    row_stride,
    IS_BF16: tl.constexpr,
    HAS_ADJUSTED: tl.constexpr,
    INTERPRET: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_B + place)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    live = token < vocab
    adjusted = False
    if HAS_ADJUSTED:
        adjusted = tl.load(is_on_R + row).to(tl.int32) != 0
    x, key, finite, forbidden = _load_logits(
        bits_BV + place * row_stride,
        adjusted_BV + place * vocab,
        adjusted,
        token,
        live,
        IS_BF16,
        INTERPRET,
    )
    params = _load_params(temperature_R, top_k_R, top_p_R, min_p_R, row)
    temperature, filters = params[0], params[4]
    seed, position = tl.load(seed_R + row), tl.load(position_R + row)

    best = _draw(x, key, token, live & finite, 0, temperature, seed, position)
    broken = tl.max((live & (finite == 0) & (forbidden == 0)).to(tl.int32), 0) > 0
    tl.store(best_BC + place * tl.num_programs(1) + chunk, tl.where(broken, NOT_FINITE, best))
    if filters:
        counted = live & finite
        ones = tl.full((CHUNK,), 1, tl.int32)
        count_K = count_BK + place * (NUM_BLOCKS * BINS)
        tl.atomic_add(count_K + key, ones, mask=counted, sem="relaxed")
        tl.store(used_BK + place * NUM_BLOCKS + key // BINS, ones, mask=counted)


@triton.jit
def _choose_kernel(
    bits_BV,
    temperature_R,
    top_k_R,
    top_p_R,
    min_p_R,
    seed_R,
    position_R,
    rows_B,
    is_on_R,
    adjusted_BV,
    best_BC,
    count_BK,
    used_BK,
    token_B,
    finite_B,
    vocab,
    row_stride,
    num_chunks,
    IS_BF16: tl.constexpr,
    HAS_ADJUSTED: tl.constexpr,
    INTERPRET: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_B + place)
    bits_V, count_K = bits_BV + place * row_stride, count_BK + place * (NUM_BLOCKS * BINS)
    adjusted_V = adjusted_BV + place * vocab
    adjusted = False
    if HAS_ADJUSTED:
        adjusted = tl.load(is_on_R + row).to(tl.int32) != 0
    temperature, top_k, top_p, min_p, filters = _load_params(
        temperature_R, top_k_R, top_p_R, min_p_R, row
    )
    chunk = tl.arange(0, CHUNKS)
    best = tl.load(best_BC + place * num_chunks + chunk, mask=chunk < num_chunks, other=NOTHING)
    finite = (tl.max(best, 0) < NOT_FINITE) & (tl.max(best, 0) > NOTHING)
    floor = 0
    if filters:
        used_K = used_BK + place * NUM_BLOCKS
        floor = take_floor(count_K, used_K, finite, temperature, top_k, top_p, min_p, IS_BF16, BINS)

    token = unpack_token(best)
    live = (chunk < num_chunks) & (token < vocab)
    key = _load_logits(bits_V, adjusted_V, adjusted, token, live, IS_BF16, INTERPRET)[1]
    answer = tl.max(tl.where(key >= floor, best, NOTHING), 0)
    dropped = tl.where(key >= floor, NOTHING, best)
    seed, position = tl.load(seed_R + row), tl.load(position_R + row)
    while tl.max(dropped, 0) > answer:
        first = unpack_token(tl.max(dropped, 0)) // CHUNK
        others = (first * CHUNK + tl.arange(0, CHUNK)).to(tl.int32)
        inside = others < vocab
        logits = _load_logits(bits_V, adjusted_V, adjusted, others, inside, IS_BF16, INTERPRET)
        found = _draw(logits[0], logits[1], others, inside, floor, temperature, seed, position)
        answer = tl.maximum(answer, found)
        dropped = tl.where(chunk == first, NOTHING, dropped)
    tl.store(token_B + place, tl.where(finite, unpack_token(answer), 0))
    tl.store(finite_B + place, finite)


def sample(
    logits_BV: torch.Tensor,
    params: SampleParams,
    *,
    rows_B: torch.Tensor | None = None,
    adjusted: Adjusted | None = None,
    buffers: SampleBuffers | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token for each place.

    Args:
        logits_BV: [B, V], any float dtype; places may have any stride.
        params: of R rows.
        rows_B: int64, the row of each place; default the first B in their order.
        adjusted: what some rows draw from instead of the logits.
        buffers: for at least B places of these V logits. Needed where the call is captured, for
            the results then lie at fixed addresses; made here otherwise.

    Returns:
        token_B int64: a token id, 0 where it is not finite. finite_B bool: whether all logits of
        the place are finite, and not all are forbidden. Those of `buffers` if given.
    """
    if logits_BV.is_cuda and logits_BV.dtype in (torch.bfloat16, torch.float16):
        return launch_sample(logits_BV, params, rows_B=rows_B, adjusted=adjusted, buffers=buffers)
    num_places = len(logits_BV)
    token_B, finite_B = sample_reference.sample(logits_BV, params, rows_B=rows_B, adjusted=adjusted)
    if buffers is None:
        return token_B, finite_B
    return buffers.token_B[:num_places].copy_(token_B), buffers.finite_B[:num_places].copy_(
        finite_B
    )


def launch_sample(
    logits_BV: torch.Tensor,
    params: SampleParams,
    *,
    rows_B: torch.Tensor | None = None,
    adjusted: Adjusted | None = None,
    buffers: SampleBuffers | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` for BF16 and FP16 logits, by the kernels above."""
    num_places, vocab = logits_BV.shape
    assert logits_BV.stride(1) == 1 and num_places > 0
    out = buffers or SampleBuffers.make(num_places, vocab, device=logits_BV.device)
    num_chunks = triton.cdiv(vocab, _CHUNK)
    assert len(out.token_B) >= num_places and out.best_BC.shape[1] == num_chunks
    assert adjusted is None or adjusted.logits_BV.is_contiguous()
    shared = (
        logits_BV.view(torch.int16),
        params.temperature_B,
        params.top_k_B,
        params.top_p_B,
        params.min_p_B,
        params.seed_B,
        params.position_B,
        out.places_B if rows_B is None else rows_B,
        out.finite_B if adjusted is None else adjusted.is_on_R,
        params.temperature_B if adjusted is None else adjusted.logits_BV,
        out.best_BC,
        out.count_BK,
        out.used_BK,
    )
    constants = {
        "IS_BF16": logits_BV.dtype == torch.bfloat16,
        "HAS_ADJUSTED": adjusted is not None,
        "INTERPRET": is_interpreted(_draw_kernel),
        "CHUNK": _CHUNK,
        "BINS": KEYS_PER_BLOCK,
        "num_warps": 4,
        "enable_fp_fusion": False,  # bits of the specification, see `sample_device`
    }
    _draw_kernel[(num_places, num_chunks)](*shared, vocab, logits_BV.stride(0), **constants)
    _choose_kernel[(num_places,)](
        *shared,
        out.token_B,
        out.finite_B,
        vocab,
        logits_BV.stride(0),
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        **constants,
    )
    return out.token_B[:num_places], out.finite_B[:num_places]
