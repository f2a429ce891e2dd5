"""Ctrl-C while the tokens of a step are given out: no request without an end, and none that goes on
behind a token that it was never told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from families import make_family, text
from hotset.core.request import FinishReason
from hotset.runtime.engine import Engine
from hotset.runtime.requests import Request
from scheduling import Answers


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    family = make_family("qwen3_moe", tmp_path_factory.mktemp("model"))
    with family.engine(
        context_tokens=160, prefill_chunk=128, max_batch=4, batch_invariant=True
    ) as engine:
        yield engine


def asked(prompt: list[int]) -> Request:
    return Request(prompt_ids=prompt, max_tokens=6)


@pytest.mark.parametrize("name", ["accept", "logprobs"])
@pytest.mark.parametrize("call", range(1, 12))
def test_an_interruption_while_tokens_are_given_out(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str, call: int
) -> None:
    """Behind a prompt or a step: who has lost a token ends by it, the others have all of theirs."""
    prompts = [text(6, seed=seed) for seed in range(3)]
    want = [generated(engine, prompt) for prompt in prompts]
    with engine.scheduling(max_waiting=8) as scheduler, monkeypatch.context() as patch:
        numbers = [scheduler.submit(asked(prompt)) for prompt in prompts]
        interrupts_at(patch, call, engine.sampler, name)
        got = Answers()
        with pytest.raises(KeyboardInterrupt):
            got.run(scheduler)
        got.run(scheduler)
    assert set(got.ends) == set(numbers)
    failed = [number for number in numbers if got.ends[number] is FinishReason.FAILED]
    assert failed
    for number, tokens in zip(numbers, want, strict=True):
        if number in failed:
            # What it was told before is its beginning.
            assert got.tokens.get(number, []) == tokens[: len(got.tokens.get(number, []))]
        else:
            assert got.ends[number] is FinishReason.LENGTH and got.tokens[number] == tokens
    assert engine.store.audit() == [] and engine.rows.num_in_flight == 0
    assert [generated(engine, prompt) for prompt in prompts] == want


def generated(engine: Engine, prompt: list[int]) -> list[int]:
    """Greedy tokens of one request alone."""
    with engine.scheduling(max_waiting=8) as scheduler:
        number = scheduler.submit(asked(prompt))
        return Answers().run(scheduler).tokens[number]


def interrupts_at(patch: pytest.MonkeyPatch, call: int, owner: object, name: str) -> None:
    """Ctrl-C in the `call`-th call of a method."""
    run, count = getattr(owner, name), 0

    def interrupted(*args: object) -> object:
        nonlocal count
        count += 1
        if count == call:
            raise KeyboardInterrupt
        return run(*args)

    patch.setattr(owner, name, interrupted)
