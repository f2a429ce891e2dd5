"""Requests that are answered together: each as if it were alone, and each ends exactly once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from families import Family, make_family, open_pocket, text
from hotset.core.errors import QueueFullError, RequestError
from hotset.core.request import FinishReason, SamplingParams
from hotset.core.slot_pools import IntArray
from hotset.runtime.engine import Engine
from hotset.runtime.kv_blocks import PrefixIndex
from hotset.runtime.requests import Request
from hotset.runtime.verify import logit_bound
from scheduling import Answers

CONTEXT = 160


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family("qwen3_moe", tmp_path_factory.mktemp("model"))


def make_engine(family: Family, *, max_batch: int = 4, **options: object) -> Engine:
    return family.engine(context_tokens=CONTEXT, prefill_chunk=128, max_batch=max_batch, **options)


@pytest.fixture(scope="module")
def engine(family: Family) -> Iterator[Engine]:
    """Fills slots as it reads; four rows in one step."""
    with make_engine(family) as engine:
        yield engine


@pytest.fixture(scope="module")
def invariant(family: Family) -> Iterator[Engine]:
    """Each row has its own steps."""
    with make_engine(family, batch_invariant=True) as engine:
        yield engine


def request(index: int, **options: object) -> Request:
    """Prompts and answers of many lengths."""
    values = {"prompt_ids": text(3 + 7 * index, seed=index), "max_tokens": 4 + 3 * index}
    return Request(**(values | options))  # type: ignore[arg-type]


def alone(engine: Engine, asked: Request) -> list[int]:
    steps = engine.generate_ids(
        asked.prompt_ids,
        max_tokens=asked.max_tokens,
        sampling=asked.sampling,
        stop_ids=asked.stop_ids,
    )
    return [step.token_id for step in steps]


def require_best(engine: Engine, asked: Request, tokens: list[int]) -> None:
    """Each greedy token is the best of its place up to what FP32 allows: two logits that are each
    off by the bound may change places."""
    ids = [*asked.prompt_ids, *tokens]
    logits_TV = engine.logits(ids)[len(asked.prompt_ids) - 1 : -1]
    chosen_T = logits_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    behind = float((logits_TV.amax(dim=1) - chosen_T).max())
    assert behind <= 2 * logit_bound(engine, logits_TV)
    other_T = logits_TV[:, 7]  # the control: any token is not good enough
    assert float((logits_TV.amax(dim=1) - other_T).max()) > 2 * logit_bound(engine, logits_TV)


def test_rows_of_different_length_decode_together(engine: Engine) -> None:
    """Six requests for four rows."""
    asked = [request(index) for index in range(6)]
    with engine.scheduling(max_waiting=8) as scheduler:
        numbers = [scheduler.submit(one) for one in asked]
        got = Answers().run(scheduler)
        counts = scheduler.counts()
    assert [len(got.tokens[number]) for number in numbers] == [one.max_tokens for one in asked]
    assert set(got.ends.values()) == {FinishReason.LENGTH}
    assert counts.num_generated_tokens == sum(map(len, got.tokens.values()))
    assert counts.num_steps < counts.num_generated_tokens - 6, "steps served several rows"
    for number, one in zip(numbers, asked, strict=True):
        require_best(engine, one, got.tokens[number])
    assert engine.store.audit() == []


def test_a_row_that_comes_back_to_a_step_goes_on_where_it_is(engine: Engine) -> None:
    """One row, then two, then the first one alone again: its step was left four tokens behind."""
    long, short = request(1, max_tokens=30), request(0, max_tokens=4)
    with engine.scheduling(max_waiting=4) as scheduler:
        first, got = scheduler.submit(long), Answers()
        while len(got.tokens.get(first, [])) < 5:
            got.step(scheduler)
        second = scheduler.submit(short)
        got.run(scheduler)
    require_best(engine, long, got.tokens[first])
    require_best(engine, short, got.tokens[second])


def test_more_rows_than_a_power_of_two(family: Family) -> None:
    """Three rows run in steps for four, whose last place is never one's own."""
    with make_engine(family, max_batch=3) as engine:
        assert [step.size for step in engine.decoding.steps] == [1, 2, 4]  # type: ignore[union-attr]
        with engine.scheduling(max_waiting=8) as scheduler:
            numbers = [scheduler.submit(request(1)) for _ in range(5)]
            got = Answers().run(scheduler)
        assert sorted(got.ends) == numbers
        assert engine.store.audit() == []


class Routed:
    """A watcher that keeps what decode steps of several rows routed."""

    def __init__(self) -> None:
        self.steps: list[tuple[IntArray, list[Hashable]]] = []

    def step(self, ids_LN: IntArray, owners: Sequence[tuple[Hashable, int]]) -> None:
        self.steps.append((ids_LN, [owner for owner, _ in owners]))

    def end(self, owner: Hashable) -> None:
        pass


def test_padded_rows_route_nowhere_and_fetch_nothing(engine: Engine) -> None:
    """Three rows run in a step for four: what it routed and read is theirs alone."""
    watcher, steps = Routed(), engine.steps
    steps.watchers.append(watcher)
    try:
        with engine.scheduling(max_waiting=8) as scheduler:
            for index in range(3):
                scheduler.submit(request(index, max_tokens=9))
            got = Answers()
            while len(got.tokens) < 3:
                got.step(scheduler)
            watcher.steps.clear()
            before = engine.traffic
            for _ in range(3):
                got.step(scheduler)
            used = engine.traffic.minus(before).used
    finally:
        steps.watchers.remove(watcher)
    top_k = engine.geometry.layers[0].top_k
    assert len(watcher.steps) == 3
    distinct = 0
    for ids_LN, owners in watcher.steps:
        assert ids_LN.shape[1] == 4 * top_k and len(owners) == 3
        assert (ids_LN[:, 3 * top_k :] == -1).all(), "the padded row routes nowhere"
        assert (ids_LN[:, : 3 * top_k] >= 0).all(), "the control: the others do"
        distinct += sum(len(np.unique(ids_N[: 3 * top_k])) for ids_N in ids_LN)
    assert used == distinct, "each record once for all rows, and none for the padding"


def test_sixteen_streams_are_sixteen_answers_token_for_token() -> None:
    """The embedded model in FP32, greedy: what is answered beside a request changes nothing."""
    pocket = open_pocket()
    asked = [
        Request(prompt_ids=pocket.ids[9 * i : 9 * i + 4 + 3 * i], max_tokens=6 + i % 5)
        for i in range(16)
    ]
    with pocket.engine(context_tokens=128, max_batch=16, batch_invariant=True) as engine:
        want = [alone(engine, one) for one in asked]
        with engine.scheduling(max_waiting=16) as scheduler:
            numbers = [scheduler.submit(one) for one in asked]
            got = Answers().run(scheduler)
        assert [got.tokens[number] for number in numbers] == want
        assert len({tuple(tokens) for tokens in want}) > 8, "they are not all alike"


def test_neighbours_change_no_drawn_token(invariant: Engine) -> None:
    """Sampled ones, which any difference of the noise would change."""
    asked = [
        request(index, sampling=SamplingParams(temperature=1.0, seed=index)) for index in range(5)
    ]
    want = [alone(invariant, one) for one in asked]
    with invariant.scheduling(max_waiting=8) as scheduler:
        pending = iter(asked)
        numbers = [scheduler.submit(next(pending)) for _ in range(2)]

        def join(step: int) -> None:
            one = next(pending, None) if step % 3 == 0 else None
            if one is not None:
                numbers.append(scheduler.submit(one))

        got = Answers().run(scheduler, after=join)
    assert [got.tokens[number] for number in numbers] == want


def test_a_stop_id_ends_one_row_and_not_the_others(invariant: Engine) -> None:
    free = alone(invariant, request(3))
    stopped = request(3, stop_ids=frozenset([free[4]]))
    with invariant.scheduling(max_waiting=8) as scheduler:
        first, second = scheduler.submit(stopped), scheduler.submit(request(3))
        got = Answers().run(scheduler)
    assert got.ends == {first: FinishReason.STOP, second: FinishReason.LENGTH}
    assert got.tokens[first] == free[: free.index(free[4]) + 1] and got.tokens[second] == free


@pytest.mark.parametrize("captured", [False, True], ids=["plain", "queued-ahead"])
def test_answers_go_on_between_the_layers_of_a_prompt(
    invariant: Engine, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """On a clock that moves by one at every look, so that what is owed does not depend on this
    machine. With half of the rate kept, a step is due at about every layer. Tokens come in order
    though some come early, also when a step was queued before the prompt."""
    assert invariant.decoding is not None
    for step in invariant.decoding.steps:
        monkeypatch.setattr(step, "captured", captured)
    short, long = request(0, max_tokens=12), request(0, prompt_ids=text(120), max_tokens=3)
    want = alone(invariant, short), alone(invariant, long)
    with invariant.scheduling(max_waiting=8) as scheduler:
        scheduler._clock = map(float, count()).__next__
        first = scheduler.submit(short)
        got = Answers()
        for _ in range(2):
            got.step(scheduler)
        assert invariant.rows.num_in_flight == int(captured)
        second = scheduler.submit(long)
        got.run(scheduler)
    assert (got.tokens[first], got.tokens[second]) == want
    served = [event.request_id for event in got.early]
    num_layers = len(invariant.geometry.layers)
    least = num_layers - 1 + int(captured)  # and the one that was queued before
    assert set(served) == {first} and least <= len(served) <= least + 2
    assert invariant.store.audit() == []


def test_short_prompts_without_end_do_not_keep_an_answer_waiting(engine: Engine) -> None:
    """Each is one forward, with no layer to stop at. On the clock of the test above a prompt takes
    one second and a step two, so at half of its rate the answer gets a token for every two of
    them: two with the first steps, and seven in 21 more."""
    with engine.scheduling(max_waiting=64) as scheduler:
        scheduler._clock = map(float, count()).__next__
        answer, got = scheduler.submit(request(0, max_tokens=12)), Answers()
        for _ in range(2):
            got.step(scheduler)
        for _ in range(40):
            scheduler.submit(request(0, max_tokens=1))
        for _ in range(21):
            got.step(scheduler)
        assert 8 <= len(got.tokens[answer]) <= 10
        got.run(scheduler)
    assert len(got.ends) == 41


def test_a_prompt_that_gets_all_time_is_not_interrupted(family: Family) -> None:
    with make_engine(family, prefill_share=1.0) as engine, engine.scheduling(max_waiting=8) as s:
        s.submit(request(0, max_tokens=12))
        got = Answers()
        got.step(s)
        s.submit(request(0, prompt_ids=text(120), max_tokens=3))
        got.run(s)
    assert not got.early


def test_what_waits_is_bounded_and_too_long_is_refused_at_once(engine: Engine) -> None:
    with engine.scheduling(max_waiting=2) as scheduler:
        numbers = [scheduler.submit(request(0)) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests wait already"):
            scheduler.submit(request(0))
        with pytest.raises(RequestError, match="150 prompt tokens and 11 new ones do not fit"):
            scheduler.submit(request(0, prompt_ids=text(150), max_tokens=11))
        got = Answers().run(scheduler)
    assert sorted(got.ends) == numbers


def test_the_oldest_is_served_first_and_waits_for_room(family: Family) -> None:
    """KV cache for two long answers; the third waits though a row is free, and so does a short one
    behind it."""
    with make_engine(family, kv_tokens=2 * CONTEXT) as engine:
        whole = {"prompt_ids": text(8), "max_tokens": CONTEXT - 8}
        with engine.scheduling(max_waiting=8) as scheduler:
            first, second, third = (scheduler.submit(request(0, **whole)) for _ in range(3))
            short = scheduler.submit(request(0))
            got = Answers()
            for _ in range(20):
                got.step(scheduler)
            counts = scheduler.counts()
            assert (counts.num_running, counts.num_waiting) == (2, 2)
            assert set(got.tokens) == {first, second}
            scheduler.cancel(first)
            got.run(scheduler)
    assert got.ends[first] is FinishReason.CANCELLED
    assert [got.ends[number] for number in (second, third, short)] == [FinishReason.LENGTH] * 3


def test_what_waits_for_a_row_is_not_hashed_at_every_step(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, find = [], PrefixIndex.find
    monkeypatch.setattr(
        PrefixIndex, "find", lambda index, ids: looked.append(len(ids)) or find(index, ids)
    )
    with (
        make_engine(family, max_batch=1, prefix_reuse=True) as engine,
        engine.scheduling(max_waiting=2) as scheduler,
    ):
        for index in (1, 2):
            scheduler.submit(request(index))
        Answers().run(scheduler)
    assert looked == [len(request(index).prompt_ids) for index in (1, 2)]


def test_nobody_is_taken_in_while_it_drains(engine: Engine) -> None:
    with engine.scheduling(max_waiting=8) as scheduler:
        number = scheduler.submit(request(1))
        scheduler.drain()
        with pytest.raises(RequestError, match="no more requests"):
            scheduler.submit(request(1))
        assert Answers().run(scheduler).ends == {number: FinishReason.LENGTH}


def test_a_model_without_a_pool_answers_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """A model of which nobody knows how to lay its cache out in blocks."""
    family = make_family("qwen3_moe", tmp_path_factory.mktemp("model"))
    family.source._geometry = replace(
        family.source.geometry, attention=(), attention_reason="it is a riddle"
    )
    asked = [request(index, max_tokens=5) for index in range(3)]
    with make_engine(family, max_batch=4) as engine:
        assert engine.decoding is None
        want = [alone(engine, one) for one in asked]
        with engine.scheduling(max_waiting=4) as scheduler:
            numbers = [scheduler.submit(one) for one in asked]
            got = Answers().run(scheduler)
    assert [got.tokens[number] for number in numbers] == want
    assert "requests are answered one by one: it is a riddle" in caplog.messages
