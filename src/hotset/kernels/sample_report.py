"""The end of a draw on the device: logprobs where asked for, the row's books, one report.

The specification is `sample_report_reference`; ids are equal to its ids, logprobs up to the order
of a sum. Two launches:

    1  many programs: maximum, sum of exponentials and the best tokens of each 1024 (rows that ask)
    2  one program a place: joins them, counts the token, moves the row on, writes the report

In 2 each chunk offers the best of its sorted list that is not taken yet, and the best of these
offers is taken `MAX_TOP_LOGPROBS` times. Never waits for the device.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hotset.core.request import MAX_TOP_LOGPROBS
from hotset.kernels import sample_adjust_reference, sample_report_reference
from hotset.kernels.sample_adjust_reference import Adjustments
from hotset.kernels.sample_device import pack, unpack_score, unpack_token
from hotset.kernels.sample_reference import SampleParams
from hotset.kernels.sample_report_reference import (
    FINITE,
    LOGPROB,
    REPORT_WIDTH,
    TOKEN,
    TOP_IDS,
    TOP_LOGPROBS,
)

_CHUNK = 1024  # tokens of a program
_NOTHING = tl.constexpr(-(2**63))
_FINITE, _LOGPROB, _TOKEN = tl.constexpr(FINITE), tl.constexpr(LOGPROB), tl.constexpr(TOKEN)
_TOP_IDS, _TOP_LOGPROBS = tl.constexpr(TOP_IDS), tl.constexpr(TOP_LOGPROBS)
_WIDTH = tl.constexpr(REPORT_WIDTH)
_N = tl.constexpr(MAX_TOP_LOGPROBS)


@dataclass(frozen=True)
class ReportBuffers:
    """Device memory of `report` for up to B places of V logits, at fixed addresses.

    Attributes:
        report_BW: int64, out.
        max_BC, sum_BC: float32, of each chunk: largest logit, sum of exp(logit - largest).
        best_BCN: int64, the best tokens of each chunk, packed, the best first.
    """

    report_BW: torch.Tensor
    max_BC: torch.Tensor
    sum_BC: torch.Tensor
    best_BCN: torch.Tensor

    @classmethod
    def make(cls, num_places: int, vocab: int, *, device: torch.device) -> ReportBuffers:
        shape = num_places, triton.cdiv(vocab, _CHUNK)
        return cls(
            report_BW=torch.zeros(num_places, REPORT_WIDTH, dtype=torch.int64, device=device),
            max_BC=torch.zeros(shape, device=device),
            sum_BC=torch.zeros(shape, device=device),
            best_BCN=torch.zeros(*shape, MAX_TOP_LOGPROBS, dtype=torch.int64, device=device),
        )


@triton.jit
def _summarise_kernel(
    logits_BV,
    rows_B,
    wants_logprobs_R,
    max_BC,
    sum_BC,
    best_BCN,
    vocab,
    row_stride,
    CHUNK: tl.constexpr,
):
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_B + place)
    if tl.load(wants_logprobs_R + row).to(tl.int32) != 0:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        live = token < vocab
        x = tl.load(logits_BV + place * row_stride + token, mask=live, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where(x == 0.0, 0.0, x)  # -0 and 0 are equals
        largest = tl.max(x, 0)
        own = place * tl.num_programs(1) + chunk
        tl.store(max_BC + own, largest)
        tl.store(sum_BC + own, tl.sum(tl.exp(x - largest), 0))
        left = tl.where(live, pack(x, token), _NOTHING)
        for n in range(_N):
            best = tl.max(left, 0)
            tl.store(best_BCN + own * _N + n, best)
            left = tl.where(left == best, _NOTHING, left)


@triton.jit
def _norm(max_BC, sum_BC, place, num_chunks, CHUNKS: tl.constexpr):
    """log(sum exp) of a place's logits."""
    chunk = tl.arange(0, CHUNKS)
    mask = chunk < num_chunks
    largest_C = tl.load(max_BC + place * num_chunks + chunk, mask=mask, other=float("-inf"))
    sum_C = tl.load(sum_BC + place * num_chunks + chunk, mask=mask, other=0.0)
    largest = tl.max(largest_C, 0)
    return largest + tl.log(tl.sum(sum_C * tl.exp(largest_C - largest), 0))


@triton.jit
def _report_kernel(
    logits_BV,
    rows_B,
    wants_logprobs_R,
    is_on_R,
    token_B,
    finite_B,
    max_BC,
    sum_BC,
    best_BCN,
    position_R,
    generated_RV,
    report_BW,
    vocab,
    row_stride,
    num_chunks,
    CHUNKS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_B + place)
    token = tl.load(token_B + place)
    finite = tl.load(finite_B + place).to(tl.int64)
    tl.store(position_R + row, tl.load(position_R + row) + 1)
    if tl.load(is_on_R + row).to(tl.int32) != 0:
        count = generated_RV + row * vocab + token
        tl.store(count, tl.load(count) + 1)
    report = report_BW + place * _WIDTH
    tl.store(report + _TOKEN, token)
    tl.store(report + _FINITE, finite)
    if (tl.load(wants_logprobs_R + row).to(tl.int64) & finite) != 0:
        norm = _norm(max_BC, sum_BC, place, num_chunks, CHUNKS)
        x = tl.load(logits_BV + place * row_stride + token).to(tl.float32)
        tl.store(report + _LOGPROB, (x - norm).to(tl.int32, bitcast=True).to(tl.int64))
        chunk = tl.arange(0, CHUNKS)
        taken = tl.zeros((CHUNKS,), tl.int32)
        lists = best_BCN + (place * num_chunks + chunk) * _N
        for n in range(_N):
            # No chunk is asked for more than its list: it would have to have given all N before.
            offer = tl.load(lists + taken, mask=chunk < num_chunks, other=_NOTHING)
            best = tl.max(offer, 0)
            some = best > _NOTHING
            logprob = (unpack_score(best) - norm).to(tl.int32, bitcast=True).to(tl.int64)
            tl.store(report + _TOP_IDS + n, tl.where(some, unpack_token(best), -1))
            tl.store(report + _TOP_LOGPROBS + n, logprob)
            taken += ((offer == best) & some).to(tl.int32)


def report(
    logits_BV: torch.Tensor,
    drawn: tuple[torch.Tensor, torch.Tensor],
    *,
    rows_B: torch.Tensor,
    wants_logprobs_R: torch.Tensor,
    params: SampleParams,
    adjustments: Adjustments,
    buffers: ReportBuffers,
) -> torch.Tensor:
    """Reports draws and moves their rows on.

    Args:
        logits_BV: as the model gave them, [B, V], any float dtype; places may have any stride.
        drawn: (token_B, finite_B) of `sample`.
        rows_B: int64, the row of each place.
        wants_logprobs_R: bool, of each row.
        params: their `position_B` grows by one for each place of a row.
        adjustments: their `generated_RV` counts the token where the row asks for something.
        buffers: for at least B places.

    Returns:
        The first B rows of `buffers.report_BW`.
    """
    if logits_BV.is_cuda:
        return launch_report(
            logits_BV,
            drawn,
            rows_B=rows_B,
            wants_logprobs_R=wants_logprobs_R,
            params=params,
            adjustments=adjustments,
            buffers=buffers,
        )
    token_B, finite_B = drawn
    params.position_B.index_add_(0, rows_B, torch.ones_like(rows_B))
    sample_adjust_reference.count(adjustments, rows_B, token_B)
    told_BW = sample_report_reference.report(
        logits_BV, token_B, finite_B, wants_logprobs_R=wants_logprobs_R, rows_B=rows_B
    )
    return buffers.report_BW[: len(rows_B)].copy_(told_BW)


def launch_report(
    logits_BV: torch.Tensor,
    drawn: tuple[torch.Tensor, torch.Tensor],
    *,
    rows_B: torch.Tensor,
    wants_logprobs_R: torch.Tensor,
    params: SampleParams,
    adjustments: Adjustments,
    buffers: ReportBuffers,
) -> torch.Tensor:
    """`report` by the kernels above."""
    num_places, vocab = logits_BV.shape
    num_chunks, out = triton.cdiv(vocab, _CHUNK), buffers
    assert logits_BV.stride(1) == 1 and out.max_BC.shape[1] == num_chunks
    _summarise_kernel[(num_places, num_chunks)](
        logits_BV,
        rows_B,
        wants_logprobs_R,
        out.max_BC,
        out.sum_BC,
        out.best_BCN,
        vocab,
        logits_BV.stride(0),
        CHUNK=_CHUNK,
        num_warps=4,
    )
    _report_kernel[(num_places,)](
        logits_BV,
        rows_B,
        wants_logprobs_R,
        adjustments.is_on_R,
        *drawn,
        out.max_BC,
        out.sum_BC,
        out.best_BCN,
        params.position_B,
        adjustments.generated_RV,
        out.report_BW,
        vocab,
        logits_BV.stride(0),
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=4,
    )
    return out.report_BW[:num_places]
