"""Every request ends exactly once, and frees what it held: cancelled, failed, closed, at random."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from families import Family, make_family, text
from hotset.core.errors import FatalError, RequestError
from hotset.core.request import FinishReason
from hotset.runtime import faults
from hotset.runtime import scheduler as scheduler_module
from hotset.runtime.decode import DecodeStep, StepResult
from hotset.runtime.engine import Engine
from hotset.runtime.requests import Request
from hotset.runtime.scheduler import Scheduler
from scheduling import Answers

CONTEXT = 160


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family("qwen3_moe", tmp_path_factory.mktemp("model"))


def make_engine(family: Family, **options: object) -> Engine:
    values = {"context_tokens": CONTEXT, "prefill_chunk": 128, "max_batch": 4}
    return family.engine(**values | options)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[False, True], ids=["together", "each-alone"])
def engine(family: Family, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with make_engine(family, batch_invariant=request.param, prefix_reuse=True) as engine:
        yield engine


def asked(index: int, **options: object) -> Request:
    values = {"prompt_ids": text(4 + 5 * index, seed=index), "max_tokens": 6 + index}
    return Request(**(values | options))  # type: ignore[arg-type]


def unharmed(engine: Engine) -> None:
    """What a fault must leave: books that are right, and an engine that answers."""
    assert engine.store.audit() == []
    assert engine.store.steps_in_flight == 0 and engine.rows.num_in_flight == 0
    assert engine.rows.num_blocks[1] == 0
    with engine.scheduling(max_waiting=4) as scheduler:
        number = scheduler.submit(asked(1))
        assert Answers().run(scheduler).ends == {number: FinishReason.LENGTH}


def fails_at(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> None:
    """Makes the `call`-th decode step fail when it is taken in."""
    finish, count = DecodeStep.finish, 0

    def failing(self: DecodeStep) -> StepResult:
        nonlocal count
        count += 1
        if count == call:
            raise error
        return finish(self)

    monkeypatch.setattr(DecodeStep, "finish", failing)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "out of memory for"),
        (RuntimeError("a kernel is wrong"), "a step failed: a kernel is wrong"),
    ],
)
def test_a_step_that_fails_ends_its_requests_and_no_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    with engine.scheduling(max_waiting=8) as scheduler, monkeypatch.context() as patch:
        running = [scheduler.submit(asked(index, max_tokens=30)) for index in range(4)]
        got = Answers()
        while len(got.tokens) < 4:
            got.step(scheduler)
        fails_at(patch, 1, error)
        waiting = scheduler.submit(asked(2))
        got.run(scheduler)
    assert [got.ends[number] for number in running] == [FinishReason.FAILED] * 4
    assert got.ends[waiting] is FinishReason.LENGTH and len(got.tokens[waiting]) == 8
    assert words in str(got.errors[running[0]]) and got.errors[running[0]].__cause__ is error
    unharmed(engine)


@pytest.mark.parametrize("num_tokens", [20, 120], ids=["that fills", "long"])
def test_a_prompt_that_fails_ends_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    with engine.scheduling(max_waiting=8) as scheduler:
        running = scheduler.submit(asked(0, max_tokens=30))
        got = Answers()
        got.step(scheduler)
        failing = scheduler.submit(asked(0, prompt_ids=text(num_tokens, seed=9)))
        with monkeypatch.context() as patch:
            for name in ("expert_outputs", "add_experts"):
                patch.setattr(type(engine.kernels), name, fail_long(engine, name))
            while failing not in got.ends:
                got.step(scheduler)
        got.run(scheduler)
    assert got.ends == {failing: FinishReason.FAILED, running: FinishReason.LENGTH}
    assert len(got.tokens[running]) == 30
    unharmed(engine)


def fail_long(engine: Engine, name: str) -> Callable[..., object]:
    """Experts that fail for more tokens than a decode step has."""
    outputs = getattr(type(engine.kernels), name)

    def failing(self: object, x_TH: torch.Tensor, *args: object, **options: object) -> object:
        if len(x_TH) > 4:
            raise RuntimeError("a prompt's layer is wrong")
        return outputs(self, x_TH, *args, **options)

    return failing


class Broken:
    """A matcher of a caller's own that breaks behind some tokens."""

    is_complete = False
    num_free = 0

    def __init__(self, behind: int) -> None:
        self._left = behind

    def fill_mask(self, mask_W: object) -> None:
        mask_W.fill(-1)  # type: ignore[attr-defined]

    def accept(self, token_id: int) -> None:
        self._left -= 1
        if self._left == 0:
            raise ValueError("a bug")


@pytest.mark.parametrize("behind", [1, 3])
def test_a_matcher_that_breaks_ends_its_own_answer(engine: Engine, behind: int) -> None:
    with engine.scheduling(max_waiting=4) as scheduler:
        free = scheduler.submit(asked(1))
        bound = scheduler.submit(asked(2, matcher=Broken(behind)))
        got = Answers().run(scheduler)
    assert got.ends == {free: FinishReason.LENGTH, bound: FinishReason.FAILED}
    assert "a bug" in got.errors[bound].message
    unharmed(engine)


def test_an_interruption_ends_what_it_met(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine.scheduling(max_waiting=8) as scheduler, monkeypatch.context() as patch:
        number = scheduler.submit(asked(0))
        got = Answers()
        got.step(scheduler)
        fails_at(patch, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            scheduler.step()
        got.run(scheduler)
    assert got.ends == {number: FinishReason.FAILED}
    unharmed(engine)


@pytest.mark.parametrize("when", ["waiting", "running", "in a prompt"])
def test_a_cancelled_request_ends_with_the_next_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    with engine.scheduling(max_waiting=8) as scheduler:
        other = scheduler.submit(asked(0, max_tokens=30))
        got = Answers()
        got.step(scheduler)
        # A text of its own: what is known of a prompt is not taken in again.
        prompt = text(120, seed=len(when))
        number = scheduler.submit(asked(0, prompt_ids=prompt, max_tokens=30))
        if when == "running":
            while number not in got.tokens:
                got.step(scheduler)
        with monkeypatch.context() as patch:
            layers: list[int] = []
            if when == "in a prompt":
                act_in_prompt(engine, patch, layers, lambda: scheduler.cancel(number))
            else:
                scheduler.cancel(number)
            got.step(scheduler)
        assert got.ends == {number: FinishReason.CANCELLED}
        assert layers == ([0] if when == "in a prompt" else []), "no second layer of it ran"
        scheduler.cancel(number)  # once more does nothing
        got.run(scheduler)
    assert got.ends[other] is FinishReason.LENGTH and len(got.tokens[other]) == 30
    unharmed(engine)


def act_in_prompt(
    engine: Engine, patch: pytest.MonkeyPatch, layers: list[int], act: Callable[[], None]
) -> None:
    """Acts in the first layer of a prompt to come; notes the layers that run."""

    def acting(layer: int, run: Callable[..., object], *args: object) -> object:
        if not layers:
            act()
        layers.append(layer)
        return run(*args)

    for layer, runner in enumerate(engine._runners):
        patch.setattr(runner, "run", partial(acting, layer, runner.run))


def test_a_device_that_failed_for_good_ends_everything(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is open is told first; then there is no further step."""
    with make_engine(family) as engine:
        gone = FatalError("the device failed for good")
        monkeypatch.setattr(scheduler_module, "explain_failure", lambda error, device: gone)
        fails_at(monkeypatch, 1, RuntimeError("CUDA error: an illegal memory access"))
        with engine.scheduling(max_waiting=8) as scheduler:
            numbers = [scheduler.submit(asked(index)) for index in range(6)]
            got = Answers()
            while len(got.ends) < 6:
                got.step(scheduler)
            assert set(got.ends.values()) == {FinishReason.FAILED} and sorted(got.ends) == numbers
            assert set(got.errors.values()) == {gone}
            assert scheduler.wait(0), "the thread that steps must learn of it"
            with pytest.raises(FatalError):
                scheduler.step()


@pytest.mark.parametrize("lasting", [True, False])
def test_an_error_that_comes_back_is_the_devices(
    monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    def synchronize(device: torch.device) -> None:
        if lasting:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    told = faults.explain_failure(error, torch.device("cuda", 0))
    assert isinstance(told, FatalError) == lasting
    assert isinstance(told, RequestError) != lasting and told.__cause__ is error


def test_an_engine_that_closes_fails_the_live_answer_and_frees_at_once(family: Family) -> None:
    """Though the iterator is held on to."""
    engine = make_engine(family)
    steps = engine.generate_ids(text(6), max_tokens=20, stop_ids=frozenset())
    next(steps)
    assert engine.decoding is not None
    parts = (engine.model, engine.store, engine.decoding.pool)
    held = [weakref.ref(part) for part in parts]
    del parts
    engine.close()
    gc.collect()
    assert [part() for part in held] == [None, None, None]
    with pytest.raises(RequestError, match="this engine is closed"):
        next(steps)


def test_an_engine_that_closes_stops_a_prompt_between_its_layers(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another thread, while a step runs."""
    engine = make_engine(family)
    got = Answers()
    with engine.scheduling(max_waiting=4) as scheduler:
        number = scheduler.submit(asked(0, prompt_ids=text(120)))
        closing = threading.Thread(target=engine.close)

        def close() -> None:
            closing.start()
            while not scheduler._closing:
                pass

        layers: list[int] = []
        act_in_prompt(engine, monkeypatch, layers, close)
        got.step(scheduler)
        closing.join()
    got.step(scheduler)
    assert got.ends == {number: FinishReason.FAILED} and layers == [0]
    assert "closed" in str(got.errors[number])


def test_what_is_queued_when_the_last_answer_ends_is_taken_in(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle engine has no step in flight: its books are whole, and slots may change."""
    assert engine.decoding is not None
    for step in engine.decoding.steps:  # as on a device: a step is queued ahead
        monkeypatch.setattr(step, "captured", True)
    with engine.scheduling(max_waiting=4) as scheduler:
        first = scheduler.submit(asked(1, max_tokens=8))
        *_, last = (answers := Answers().run(scheduler)).tokens[first]
        number = scheduler.submit(asked(1, max_tokens=40, stop_ids=frozenset({last})))
        while number not in answers.ends:
            answers.step(scheduler)
        assert engine.rows.num_in_flight > 0, "control: something is queued"
        while scheduler.wait(0):
            answers.step(scheduler)
        assert engine.rows.num_in_flight == 0 and engine.store.steps_in_flight == 0
        engine.place(engine.store.placement)


def test_an_error_that_is_kept_keeps_no_tensors(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def failing(self: DecodeStep) -> StepResult:
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    with engine.scheduling(max_waiting=4) as scheduler, monkeypatch.context() as patch:
        patch.setattr(DecodeStep, "finish", failing)
        number = scheduler.submit(asked(1))
        answers = Answers().run(scheduler)
        assert isinstance(answers.errors[number], RequestError)
        assert held and held[0]() is None
    unharmed(engine)


def test_requests_at_random_each_end_once(engine: Engine) -> None:
    """Joins, leaves, cancels in any state, steps that fail; a fixed seed."""
    rng = random.Random(0)
    cancelled: set[int] = set()
    with engine.scheduling(max_waiting=60) as scheduler, pytest.MonkeyPatch.context() as patch:
        numbers = []
        for _ in range(60):
            prompt = text(rng.choice([1, 5, 30, 40, 70]), seed=rng.randrange(4))
            numbers.append(
                scheduler.submit(Request(prompt_ids=prompt, max_tokens=rng.randrange(1, 12)))
            )
        fails_at(patch, 40, RuntimeError("one step breaks"))

        def disturb(step: int) -> None:
            if rng.random() < 0.2:
                number = rng.choice(numbers)
                scheduler.cancel(number)
                cancelled.add(number)

        got = Answers().run(scheduler, after=disturb)
        counts = scheduler.counts()
    assert sorted(got.ends) == numbers
    reasons = set(got.ends.values())
    assert reasons == {FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.FAILED}
    assert {n for n, reason in got.ends.items() if reason is FinishReason.CANCELLED} <= cancelled
    assert counts.num_prefix_tokens > 0 or engine.config.batch_invariant
    unharmed(engine)


def test_any_thread_may_submit_and_cancel(engine: Engine) -> None:
    numbers: list[int] = []

    def ask(scheduler: Scheduler, seed: int) -> None:
        for index in range(6):
            number = scheduler.submit(asked(index % 3, max_tokens=3))
            numbers.append(number)
            if (index + seed) % 3 == 0:
                scheduler.cancel(number)

    with engine.scheduling(max_waiting=60) as scheduler:
        threads = [threading.Thread(target=ask, args=(scheduler, seed)) for seed in range(3)]
        for thread in threads:
            thread.start()
        got = Answers()
        while any(thread.is_alive() for thread in threads) or scheduler.wait(0):
            got.step(scheduler)
        got.run(scheduler)
    assert sorted(got.ends) == sorted(numbers) and len(numbers) == 18
    unharmed(engine)
