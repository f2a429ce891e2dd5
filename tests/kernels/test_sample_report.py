"""Logprobs and the report of a step: the specification against log-softmax, the kernels against
the specification."""

from __future__ import annotations

import pytest
import torch

from hotset.core.request import MAX_TOP_LOGPROBS
from hotset.kernels import sample_report_reference as spec
from hotset.kernels.sample_adjust_reference import Adjustments
from hotset.kernels.sample_reference import SampleParams
from hotset.kernels.sample_report import ReportBuffers, launch_report, report
from hotset.kernels.sample_report_reference import LOGPROB, TOP_IDS, TOP_LOGPROBS
from kernels.support import DEVICE, EPS32

VOCAB = 2100


def random_logits(num_rows: int, vocab: int = VOCAB) -> torch.Tensor:
    x = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(1)) * 3
    return x.bfloat16().to(DEVICE)  # of which many are equal


def floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32).double()


def bound(x_V: torch.Tensor, vocab: int) -> float:
    """How far a logprob in FP32 may be from the exact one.

    Exponentials and their sum of V positive numbers err relatively by at most (V + 4) eps, which is
    absolute after the logarithm; the logarithm, the largest logit that is added to it, and the
    difference round by half an eps of their size each.
    """
    size = float(x_V.double().abs().max()) * 2 + 16
    return (vocab + 4) * EPS32 + 3 * EPS32 * size


def test_the_specification_is_a_log_softmax() -> None:
    x_BV = random_logits(3)
    token_B, on = torch.tensor([5, 1999, 0], device=DEVICE), torch.ones(3, dtype=torch.bool)
    told = spec.report(
        x_BV,
        token_B,
        torch.ones(3, dtype=torch.bool, device=DEVICE),
        wants_logprobs_R=on.to(DEVICE),
        rows_B=torch.arange(3, device=DEVICE),
    )
    exact_BV = torch.log_softmax(x_BV.double(), 1)
    for place in range(3):
        limit = bound(x_BV[place], VOCAB)
        own = floats(told[place, LOGPROB])
        assert abs(own - exact_BV[place, token_B[place]]) <= limit
        order = torch.sort(x_BV[place].float(), descending=True, stable=True).indices
        ids = told[place, TOP_IDS:TOP_LOGPROBS]
        assert torch.equal(ids, order[:MAX_TOP_LOGPROBS]), "the lower id first among equals"
        near = floats(told[place, TOP_LOGPROBS:]) - exact_BV[place, ids]
        assert near.abs().max() <= limit
        hot = torch.log_softmax(x_BV[place].double() * 0.99, 0)
        assert (floats(told[place, TOP_LOGPROBS:]) - hot[ids]).abs().max() > limit, "control"


@pytest.mark.parametrize("vocab", [7, 1024, VOCAB])
def test_the_kernels_report_what_the_specification_does(vocab: int) -> None:
    """Rows that ask and rows that do not, out of order, with padding, twice."""
    rows = torch.tensor([2, 3, 0, 1], device=DEVICE)
    x_BV = random_logits(4, vocab)
    wants = torch.tensor([True, False, True, False], device=DEVICE)  # the last is padding
    books = []
    for run in (report, launch_report):
        buffers = ReportBuffers.make(4, vocab, device=DEVICE)
        params = SampleParams.greedy(4, device=DEVICE)
        adjustments = Adjustments.off(3, vocab, num_padding=1, device=DEVICE)
        adjustments.is_on_R[1] = True
        for step in range(2):
            token_B = torch.tensor([0, 5, 3, 6], device=DEVICE) - step
            finite_B = torch.tensor([True, True, True, step == 0], device=DEVICE)
            told = run(
                x_BV,
                (token_B.clamp(min=0), finite_B),
                rows_B=rows,
                wants_logprobs_R=wants,
                params=params,
                adjustments=adjustments,
                buffers=buffers,
            ).clone()
        books.append((told, params.position_B.clone(), adjustments.generated_RV.clone()))
    (want, positions, counts), (got, own_positions, own_counts) = books
    assert torch.equal(own_positions, positions) and positions.tolist() == [2, 2, 2, 2]
    assert torch.equal(own_counts, counts) and counts.nonzero().tolist() == [[1, 5], [1, 6]]
    assert torch.equal(got[:, :2], want[:, :2]), "tokens and flags"
    num_top = min(vocab, MAX_TOP_LOGPROBS)
    for place in (0, 2):
        ids = got[place, TOP_IDS:TOP_LOGPROBS]
        assert torch.equal(ids, want[place, TOP_IDS:TOP_LOGPROBS])
        assert (ids[num_top:] == -1).all()
        # Both are within `bound` of the exact one.
        limit = 2 * bound(x_BV[place], vocab)
        for columns in (slice(LOGPROB, LOGPROB + 1), slice(TOP_LOGPROBS, TOP_LOGPROBS + num_top)):
            near = floats(got[place, columns]) - floats(want[place, columns])
            assert near.abs().max() <= limit


def test_logits_far_below_zero_do_not_vanish() -> None:
    """Sums of exponentials are taken from the largest on."""
    x_BV = (random_logits(1, 1500).float() - 30000).to(torch.float32)
    told = launch_report(
        x_BV,
        (torch.tensor([3], device=DEVICE), torch.tensor([True], device=DEVICE)),
        rows_B=torch.tensor([0], device=DEVICE),
        wants_logprobs_R=torch.tensor([True], device=DEVICE),
        params=SampleParams.greedy(1, device=DEVICE),
        adjustments=Adjustments.off(1, 1500, device=DEVICE),
        buffers=ReportBuffers.make(1, 1500, device=DEVICE),
    )
    exact = torch.log_softmax(x_BV[0].double(), 0)[3]
    assert abs(floats(told[0, LOGPROB]) - exact) <= bound(x_BV[0], 1500)
