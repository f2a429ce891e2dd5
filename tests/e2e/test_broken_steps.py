"""What a step leaves behind that broke off halfway, and what an engine does that was closed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest

import hotset
from hotset.core.errors import RequestError
from hotset.core.request import FinishReason
from hotset.runtime.decode import DecodeStep, StepResult
from hotset.runtime.engine import Engine

PROMPT, NUM_TOKENS = list(range(3, 20)), 12


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Fills slots as it reads: about half of the experts have one."""
    with hotset.load("pocket", device="cpu", vram="84MiB", context=256) as model:
        assert 0 < model.plan.num_slots < model.engine.geometry.num_records
        assert model.engine.policy.moves
        yield model.engine


def answer(engine: Engine) -> list[int]:
    steps = engine.generate_ids(PROMPT, max_tokens=NUM_TOKENS, stop_ids=frozenset())
    return [step.token_id for step in steps]


def break_off(engine: Engine, call: int) -> Callable[[], None]:
    """Makes the last MoE layer fail the `call`-th time; returns what ends that."""
    runner, count, combine = engine._runners[-1], 0, engine.kernels.combine

    class Failing:
        def __getattr__(self, name: str) -> object:
            return getattr(engine.kernels, name)

        def combine(self, *args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == call:
                raise KeyboardInterrupt
            return combine(*args, **kwargs)  # type: ignore[arg-type]

    runner._kernels = Failing()  # type: ignore[assignment]

    def mend() -> None:
        runner._kernels = engine.kernels

    return mend


@pytest.mark.parametrize("call", [1, 4], ids=["prefill", "decode"])
def test_a_step_that_breaks_off_leaves_nothing(engine: Engine, call: int) -> None:
    expected = answer(engine)
    mend = break_off(engine, call)
    with pytest.raises(KeyboardInterrupt):
        answer(engine)
    mend()
    assert engine.store.audit() == []
    engine.place(engine.store.placement)  # refused while a step counts as queued
    assert answer(engine) == expected
    assert engine.store.audit() == []


def test_an_interruption_of_the_books_of_a_prompt_is_mended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its kernels, and behind them, when the device has filled slots."""
    expected = answer(engine)
    books = {"begin_step": engine.steps.fills, "match_step": engine.store.placement}
    for name, owner in {**books, "adopt": engine.store.table}.items():
        keep = getattr(owner, name)

        def interrupted(*args: object, keep: Callable[..., object] = keep) -> None:
            keep(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                answer(engine)
        assert engine.store.audit() == [], name
        engine.place(engine.store.placement)  # refused while a step counts as queued
        assert answer(engine) == expected, name


def test_books_that_miss_a_step_are_found(engine: Engine) -> None:
    """The control: what `mend` spares the test above."""
    engine.steps.mend = lambda: None  # type: ignore[method-assign]
    break_off(engine, 4)
    with pytest.raises(KeyboardInterrupt):
        answer(engine)
    assert engine.store.audit() != []


def test_an_answer_of_a_closed_engine_fails_in_words(engine: Engine) -> None:
    steps = engine.generate_ids(PROMPT, max_tokens=NUM_TOKENS)
    next(steps)
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        next(steps)
    assert engine.traffic.steps == 1


@pytest.fixture
def ahead(engine: Engine) -> DecodeStep:
    """Queues a step before the last one's token is known, as a captured one is."""
    assert engine.decoding is not None
    (step,) = engine.decoding.steps
    step.captured = True
    return step


def test_an_interruption_while_waiting_takes_what_is_queued_with_it(
    engine: Engine, ahead: DecodeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, finish, num_calls = answer(engine), ahead.finish, 0

    def interrupted() -> StepResult:
        nonlocal num_calls
        num_calls += 1
        result = finish()
        if num_calls == 3:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(ahead, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(engine)
    assert ahead.num_in_flight == engine.store.steps_in_flight == 0
    assert engine.store.audit() == []
    assert answer(engine) == expected


def test_an_answer_that_is_dropped_takes_in_what_it_queued(
    engine: Engine, ahead: DecodeStep
) -> None:
    expected = answer(engine)
    steps = engine.generate_ids(PROMPT, max_tokens=NUM_TOKENS)
    assert [next(steps).token_id for _ in range(4)] == expected[:4]
    assert ahead.num_in_flight == 1
    with pytest.raises(RequestError, match="queued"):
        engine.place(engine.store.placement)
    steps.close()  # type: ignore[attr-defined]
    assert ahead.num_in_flight == engine.store.steps_in_flight == 0
    engine.place(engine.store.placement)
    assert engine.store.audit() == []
    assert answer(engine) == expected


def test_the_next_answer_may_begin_once_the_last_token_is_there(engine: Engine) -> None:
    steps = engine.generate_ids(PROMPT, max_tokens=NUM_TOKENS, stop_ids=frozenset())
    first = next(steps)
    with pytest.raises(RequestError, match="another answer"):
        answer(engine)
    taken = [first, *(next(steps) for _ in range(NUM_TOKENS - 1))]
    assert taken[-1].finish_reason is FinishReason.LENGTH
    assert answer(engine) == [step.token_id for step in taken]


def test_a_closed_engine_holds_nothing(engine: Engine) -> None:
    answer(engine)
    assert engine.decoding is not None
    held = [weakref.ref(part) for part in (engine.model, engine.store, engine.decoding.pool)]
    assert all(part() is not None for part in held)
    engine.close()
    assert [part() for part in held] == [None, None, None]
