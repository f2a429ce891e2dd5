"""The sampler of an engine's rows: a request's parameters, draw by draw."""

from __future__ import annotations

import pytest
import torch

from hotset.core.errors import RequestError
from hotset.core.request import SamplingParams
from hotset.runtime.sampling import Sampler

VOCAB = 1000
LOGITS_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))


def draws(params: SamplingParams, num_draws: int = 8) -> list[int]:
    sampler = Sampler(1, VOCAB, device=torch.device("cpu"))
    sampler.start(0, params)
    return [sampler.draw(0, LOGITS_V).token for _ in range(num_draws)]


def test_a_seed_gives_the_same_answer_and_each_draw_is_another() -> None:
    tokens = draws(SamplingParams(temperature=1.0, seed=3))
    assert tokens == draws(SamplingParams(temperature=1.0, seed=3))
    assert tokens != draws(SamplingParams(temperature=1.0, seed=4))
    assert len(set(tokens)) > 1


def test_a_new_answer_starts_over() -> None:
    sampler, params = Sampler(1, VOCAB, device=torch.device("cpu")), SamplingParams(seed=1)
    sampler.start(0, SamplingParams(temperature=1.0, seed=1))
    first = [sampler.draw(0, LOGITS_V).token for _ in range(4)]
    sampler.start(0, SamplingParams(temperature=1.0, seed=1))
    assert [sampler.draw(0, LOGITS_V).token for _ in range(4)] == first
    sampler.start(0, params)
    assert sampler.draw(0, LOGITS_V).token == int(LOGITS_V.argmax()), "greedy, whatever the seed"


def test_more_candidates_than_tokens_are_all_of_them() -> None:
    asked = SamplingParams(temperature=1.0, seed=3, top_k=2**31 - 1)
    assert draws(asked) == draws(SamplingParams(temperature=1.0, seed=3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    sampler = Sampler(1, VOCAB, device=torch.device("cpu"))
    sampler.start(0, SamplingParams())
    logits_V = LOGITS_V.clone()
    logits_V[7] = bad
    with pytest.raises(RequestError, match="not finite"):
        sampler.draw(0, logits_V).require_finite()
