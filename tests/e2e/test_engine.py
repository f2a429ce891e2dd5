"""Requests and the life of an engine: what is refused, one answer at a time, ends, failures."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from families import Family, make_family, text
from hotset.core.errors import CapacityError, HotsetError, RequestError
from hotset.core.placement import Placement
from hotset.core.request import FinishReason, SamplingParams
from hotset.runtime.engine import Engine
from tiny import VOCAB

PROMPT = text(6)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(family: Family) -> Iterator[Engine]:
    with family.engine() as engine:
        yield engine


def answer(engine: Engine, num_tokens: int = 8) -> list[int]:
    steps = engine.generate_ids(PROMPT, max_tokens=num_tokens, stop_ids=frozenset())
    return [step.token_id for step in steps]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "no tokens"),
        ([3, VOCAB], f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([-1], "token id -1 is outside"),
        ([1.5], "whole numbers"),
        (["5"], "whole numbers"),
        ("567", "whole numbers"),
    ],
)
def test_ids_that_are_none(engine: Engine, ids: list, words: str) -> None:
    """Where the request is made, not at its first token."""
    with pytest.raises(RequestError, match=words):
        engine.generate_ids(ids)
    with pytest.raises(RequestError, match=words):
        engine.logits(ids)
    assert len(answer(engine)) == 8


def test_ids_of_any_integer_type(engine: Engine) -> None:
    want = engine.logits(PROMPT)
    for ids in (tuple(PROMPT), np.array(PROMPT, dtype=np.int32), torch.tensor(PROMPT)):
        assert torch.equal(engine.logits(ids), want)


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, "5"])
def test_lengths_that_are_none(engine: Engine, max_tokens: object) -> None:
    with pytest.raises(RequestError, match="`max_tokens` is"):
        engine.generate_ids(PROMPT, max_tokens=max_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 1e-40),
        ("temperature", 101.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 0.5),
    ],
)
def test_sampling_that_makes_no_sense(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"`{name}` is"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 100.0])
def test_extreme_temperatures(engine: Engine, temperature: float) -> None:
    """Cold is greedy, hot is still a token; neither overflows."""
    sampling = SamplingParams(temperature=temperature, seed=1)
    steps = engine.generate_ids(PROMPT, max_tokens=8, sampling=sampling, stop_ids=frozenset())
    ids = [step.token_id for step in steps]
    assert all(0 <= token < VOCAB for token in ids)
    if temperature < 1e-2:
        assert ids == answer(engine)


def test_an_end_id_is_put_out_and_ends(engine: Engine) -> None:
    want = answer(engine)
    end = want[3]
    steps = list(engine.generate_ids(PROMPT, max_tokens=8, stop_ids=frozenset([end])))
    first = want.index(end)
    assert [step.token_id for step in steps] == want[: first + 1]
    assert [step.finish_reason for step in steps[:-1]] == [None] * first
    assert steps[-1].finish_reason is FinishReason.STOP


def test_the_last_token_may_be_an_end(engine: Engine) -> None:
    """Then it ended by itself, and was not cut off."""
    (step,) = engine.generate_ids(PROMPT, max_tokens=1, stop_ids=frozenset(range(VOCAB)))
    assert step.finish_reason is FinishReason.STOP
    (step,) = engine.generate_ids(PROMPT, max_tokens=1, stop_ids=frozenset())
    assert step.finish_reason is FinishReason.LENGTH


def test_one_answer_at_a_time(engine: Engine) -> None:
    first = engine.generate_ids(PROMPT, max_tokens=8, stop_ids=frozenset())
    second = engine.generate_ids(PROMPT, max_tokens=8, stop_ids=frozenset())
    tokens = [next(first).token_id]
    with pytest.raises(RequestError, match="another answer is being generated"):
        next(second)
    with pytest.raises(RequestError, match="another answer is being generated"):
        engine.logits(PROMPT)
    tokens += [step.token_id for step in first]
    assert tokens == answer(engine), "the one that ran is none the worse"


@pytest.mark.parametrize("how", ["dropped", "closed", "left in a loop"])
def test_an_answer_that_is_left_early_gives_its_place_back(engine: Engine, how: str) -> None:
    steps = engine.generate_ids(PROMPT, max_tokens=8, stop_ids=frozenset())
    if how == "left in a loop":
        for _ in steps:
            break
    else:
        next(steps)
    if how == "closed":
        steps.close()  # type: ignore[attr-defined]
    else:
        del steps
        gc.collect()
    assert len(answer(engine)) == 8


def test_an_answer_that_never_began_takes_no_place(engine: Engine) -> None:
    waiting = engine.generate_ids(PROMPT, max_tokens=2, stop_ids=frozenset())
    assert len(answer(engine)) == 8
    assert len(list(waiting)) == 2


def test_a_closed_engine_refuses_everything(family: Family) -> None:
    engine = family.engine()
    waiting = engine.generate_ids(PROMPT, max_tokens=4)
    pools = engine.pools
    engine.close()
    engine.close()
    for request in (
        lambda: engine.generate_ids(PROMPT),
        lambda: engine.logits(PROMPT),
        lambda: engine.place(Placement(pools)),
        lambda: next(waiting),
    ):
        with pytest.raises(RequestError, match="closed"):
            request()


def test_loading_that_fails_gives_everything_back(family: Family, monkeypatch) -> None:
    """Whatever raises, interruptions included."""
    stores = []
    make = Engine._make_store

    def watched(self: Engine):
        stores.append(make(self))
        return stores[-1]

    monkeypatch.setattr(Engine, "_make_store", watched)
    for failure in (KeyboardInterrupt, RuntimeError, HotsetError):

        def fails(*_: object, failure: type[BaseException] = failure) -> None:
            raise failure("while loading")

        with monkeypatch.context() as patch:
            patch.setattr(type(family.source), "fill_experts", fails)
            with pytest.raises(failure, match="while loading"):
                family.engine()
        assert stores[-1].arena.bytes_.numel() == 0, "the arena is closed"


class Allocator:
    """Fails the k-th allocation of at least `least` bytes, as torch's allocators fail."""

    def __init__(self, monkeypatch, *, k: int, least: int, device: bool) -> None:
        self.count, self.k, self.least, self.device = 0, k, least, device
        for name in ("empty", "zeros", "full"):
            monkeypatch.setattr(torch, name, self.guarded(getattr(torch, name)))
        for name in ("new_zeros", "new_empty"):
            monkeypatch.setattr(torch.Tensor, name, self.guarded(getattr(torch.Tensor, name)))

    def guarded(self, make):
        def allocate(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.device.type == "cpu" and tensor.nbytes >= self.least:
                self.count += 1
                if self.count == self.k:
                    raise self.failure(tensor.nbytes)
            return tensor

        return allocate

    def failure(self, nbytes: int) -> RuntimeError:
        if self.device:
            return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes.")
        return RuntimeError(
            "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate "
            f"memory: you tried to allocate {nbytes} bytes. Error code 12 (Cannot allocate memory)"
        )


@pytest.mark.parametrize(
    ("k", "device"),
    [*((k, False) for k in (*range(1, 11), 15, 20)), *((k, True) for k in (1, 4, 7, 10, 20))],
)
def test_memory_that_runs_out_while_loading_is_called_that(
    family: Family, monkeypatch, k: int, device: bool
) -> None:
    """UX-04: memory, its bytes, and what it was for; nothing unrelated."""
    with monkeypatch.context() as patch:
        allocator = Allocator(patch, k=k, least=1024, device=device)
        with pytest.raises(CapacityError) as caught:
            family.engine()
    assert allocator.count >= k  # other threads of a loader may go on for a while
    message = caught.value.message
    assert "memory" in message and "bytes" in message
    assert any(
        component in message
        for component in ("slots", "staging", "resident weights", "experts", "KV", "tables")
    ), message
    assert caught.value.hint


def test_memory_that_runs_out_in_a_step_fails_that_request_only(
    family: Family, monkeypatch
) -> None:
    """MB-07: the next request works."""
    with family.engine(policy="none") as engine:
        want = answer(engine)
        with monkeypatch.context() as patch:
            Allocator(patch, k=1, least=1024, device=True)
            with pytest.raises(RequestError, match="out of memory for a step") as caught:
                engine.logits(text(40))
        assert "--prefill-chunk" in (caught.value.hint or "")
        assert answer(engine) == want
