"""Bias, penalties and masks: the specification against transformers' processors and OpenAI's
formula; the kernel against the specification, bit for bit; draws from adjusted logits."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from hotset.kernels import sample_adjust_reference as spec
from hotset.kernels import sample_reference
from hotset.kernels.sample import SampleBuffers, launch_sample
from hotset.kernels.sample_adjust import adjust, launch_adjust
from hotset.kernels.sample_adjust_reference import Adjustments
from hotset.kernels.sample_reference import Adjusted, SampleParams
from kernels.support import DEVICE

VOCAB = 2100  # three chunks, the last in part
CPU = torch.device("cpu")


def random_logits(num_rows: int, vocab: int = VOCAB, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def mask_of(allowed: list[int], vocab: int) -> torch.Tensor:
    bits = torch.zeros(spec.num_words(vocab) * 32, dtype=torch.int64)
    bits[allowed] = 1
    words = (bits.reshape(-1, 32) << torch.arange(32)).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def make(num_rows: int, vocab: int = VOCAB, *, seed: int = 0) -> Adjustments:
    """Rows 0 and 3 ask for nothing; 1 for all penalties and a bias; 2 for a mask as well; the last
    is padding."""
    source = torch.Generator().manual_seed(seed)
    own = Adjustments.off(num_rows, vocab, num_padding=1, device=CPU)
    for row in (1, 2):
        own.is_on_R[row] = True
        own.bias_RV[row] = torch.randn(vocab, generator=source) * 10
        own.repetition_R[row] = 1.3 if row == 1 else 0.7
        own.frequency_R[row], own.presence_R[row] = 0.37, -1.21
        own.prompted_RV[row] = torch.rand(vocab, generator=source) < 0.2
        own.generated_RV[row] = torch.randint(4, (vocab,), generator=source)
    own.is_masked_R[2] = True
    own.mask_RW[2] = mask_of(list(range(0, vocab, 3)), vocab)
    return Adjustments(*(getattr(own, field.name).to(DEVICE) for field in fields(own)))


def one_row(**values: Any) -> Adjustments:
    own = Adjustments.off(1, 8, device=CPU)
    own.is_on_R.fill_(True)
    for name, value in values.items():
        getattr(own, name).copy_(torch.as_tensor(value))
    return own


def test_bias_and_repetition_are_the_librarys() -> None:
    x_1V = torch.tensor([[2.0, -1.0, 0.5, 3.0, -2.5, 0.0, 1.0, -0.25]])
    prompt, answer = [1, 3], [3, 6, 6]
    bias = {0: -100.0, 4: 1.5, 6: 7.0}
    dense = torch.zeros(8)
    dense[list(bias)] = torch.tensor(list(bias.values()))
    counts = torch.bincount(torch.tensor(answer), minlength=8)
    own = one_row(
        bias_RV=dense,
        repetition_R=1.4,
        prompted_RV=torch.isin(torch.arange(8), torch.tensor(prompt)),
        generated_RV=counts,
    )
    ids = torch.tensor([prompt + answer])
    want = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(
        ids, x_1V.clone()
    )
    want = RepetitionPenaltyLogitsProcessor(1.4)(ids, want)
    rows_B = torch.tensor([0])
    assert torch.equal(spec.adjust(x_1V, own, rows_B), want)
    own.prompted_RV.fill_(False)
    assert not torch.equal(spec.adjust(x_1V, own, rows_B), want), "control: the prompt counts"


def test_frequency_and_presence_are_openais() -> None:
    """mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, c of sampled
    tokens only. Numbers that FP32 holds exactly, so that both are equal."""
    mu, c = torch.tensor([[4.0, -2.0, 1.0, 0.5, 0.0, 8.0, 1.0, 1.0]]), [0, 1, 2, 0, 3, 0, 0, 0]
    own = one_row(frequency_R=0.25, presence_R=-0.5, generated_RV=c, prompted_RV=[True] * 8)
    counts = torch.tensor([c])
    want = mu - counts * 0.25 - (counts > 0).float() * -0.5
    assert torch.equal(spec.adjust(mu, own, torch.tensor([0])), want)


def test_tokens_are_counted_where_that_matters() -> None:
    own = make(4)
    before = own.generated_RV.clone()
    rows_B = torch.tensor([3, 1, 4, 2], device=DEVICE)
    spec.count(own, rows_B, torch.tensor([7, 8, 9, 10], device=DEVICE))
    grown = (own.generated_RV - before).nonzero().tolist()
    assert grown == [[1, 8], [2, 10]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_has_the_specifications_bits(dtype: torch.dtype) -> None:
    own, rows = make(4), torch.tensor([2, 4, 0, 1], device=DEVICE)
    x_BV = random_logits(4).to(dtype).to(DEVICE)
    x_BV[0, 5] = torch.nan
    x_BV[0, 2099] = torch.inf
    want = spec.adjust(x_BV, own, rows)
    out = torch.full((4, VOCAB), 7.5, device=DEVICE)
    got = launch_adjust(x_BV, own, rows, out=out)
    for place in (0, 3):
        assert torch.equal(got[place].isnan(), want[place].isnan())
        assert torch.equal(got[place].nan_to_num(9e9), want[place].nan_to_num(9e9))
    assert want[0].isnan().nonzero().flatten().tolist() == [5, 2099]
    assert torch.isneginf(want[0]).sum() == VOCAB - VOCAB // 3 - 2
    for place in (1, 2):
        assert (got[place] == 7.5).all(), "rows that ask for nothing cost and change nothing"
    for wrong in ("frequency_R", "bias_RV", "prompted_RV", "mask_RW"):
        changed = make(4)
        tensor = getattr(changed, wrong)
        tensor[1:3] = ~tensor[1:3] if tensor.dtype != torch.float32 else tensor[1:3] + 1
        other = launch_adjust(x_BV, changed, rows, out=torch.empty_like(out))
        assert not torch.equal(other.nan_to_num(9e9), got.nan_to_num(9e9)), "control"


def test_on_a_cpu_nothing_is_done_for_who_asks_nothing() -> None:
    own, out = Adjustments.off(2, 50, num_padding=1, device=CPU), torch.full((2, 50), 3.0)
    adjust(random_logits(2, 50), own, torch.tensor([2, 0]), out=out)
    assert (out == 3).all()


ROWS = [
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 0.5, "min_p": 0.001},
    {"temperature": 0.8, "min_p": 0.3},
    {},
]


def params_of(rows: list[dict[str, Any]]) -> SampleParams:
    params = SampleParams.greedy(len(rows), device=DEVICE)
    params.temperature_B.fill_(1.0)
    for row, values in enumerate(rows):
        for name, value in values.items():
            getattr(params, f"{name}_B")[row] = value
    params.seed_B.copy_(torch.arange(len(rows)))
    return params


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adjusted_draws_are_the_specifications(dtype: torch.dtype) -> None:
    """Every kind of row with adjusted logits, and one without, in an order that is not theirs."""
    params, source, vocab = params_of(ROWS), torch.Generator().manual_seed(5), 1100
    buffers = SampleBuffers.make(5, vocab, device=DEVICE)
    rows = torch.tensor([3, 1, 4, 0, 2], device=DEVICE)
    differ, on = 0, [True, True, False, True, True]
    for seed in range(2):
        x_BV = random_logits(5, vocab, seed=seed).to(dtype).to(DEVICE)
        other_BV = torch.randn(5, vocab, generator=source) * 3
        other_BV[torch.rand(5, vocab, generator=source) < 0.5] = -torch.inf
        other_BV[1, 17] = torch.finfo(dtype).max
        adjusted = Adjusted(torch.tensor(on, device=DEVICE), other_BV.to(DEVICE))
        want = sample_reference.sample(x_BV, params, rows_B=rows, adjusted=adjusted)
        got = launch_sample(x_BV, params, rows_B=rows, adjusted=adjusted, buffers=buffers)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and got[1].all()
        assert not buffers.count_BK.any() and not buffers.used_BK.any()
        plain, _ = sample_reference.sample(x_BV, params, rows_B=rows)
        assert all(
            other_BV[place, token].isfinite()
            for place, token in enumerate(got[0].tolist())
            if on[int(rows[place])]
        ), "what is forbidden is never drawn"
        differ += int((plain != got[0]).sum())
    assert differ >= 6, "control: adjusted logits decide"


def test_small_biases_are_not_rounded_away() -> None:
    """0.01 at a logit of 20, where BF16 steps are 0.125."""
    x_BV = torch.tensor([[20.0, 20.0, 1.0]]).bfloat16().to(DEVICE)
    raised = torch.tensor([[20.0, 20.01, 1.0]], device=DEVICE)
    params = SampleParams.greedy(1, device=DEVICE)
    on = torch.tensor([True], device=DEVICE)
    for draw in (sample_reference.sample, launch_sample):
        assert int(draw(x_BV, params, adjusted=Adjusted(on, raised))[0]) == 1
        assert int(draw(x_BV, params)[0]) == 0, "control"


def test_a_row_in_which_all_is_forbidden_says_so() -> None:
    x_BV = random_logits(2, 40).bfloat16().to(DEVICE)
    other_BV = x_BV.float()
    other_BV[0] = -torch.inf
    adjusted = Adjusted(torch.tensor([True, True], device=DEVICE), other_BV)
    for values in ({}, {"top_k": 3}, {"temperature": 0.0}):
        for draw in (sample_reference.sample, launch_sample):
            token_B, finite_B = draw(x_BV, params_of([values] * 2), adjusted=adjusted)
            assert finite_B.tolist() == [False, True] and token_B[0] == 0
