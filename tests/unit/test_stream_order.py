"""What lies in a staging buffer is read behind its copies, and copied over behind its readers.

Streams and events here only remember what they are ordered behind, so a missing order shows on a
machine without a GPU, and in every run. Bytes are not looked at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from records import layers, make_store, resident, routed, runner

from hotset.experts import ring as ring_module
from hotset.experts.store import ExpertStore
from hotset.kernels.dispatch import ReferenceKernels
from hotset.kernels.gather import copy_records
from hotset.runtime.block_sums import FewTokens
from hotset.runtime.blocks import Block
from hotset.runtime.expert_stream import ExpertStream
from hotset.runtime.moe import MATCH_TOKENS
from hotset.runtime.tee import Tee

NUM_LAYERS, NUM_EXPERTS, MANY = 3, 16, MATCH_TOKENS + 8
Operation = tuple[str, int]


class Stream:
    """Knows how many operations of each stream come before what it does next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: Counter[str] = Counter()

    def wait_event(self, event: Event) -> None:
        self.seen |= event.seen  # the larger number of each

    def operation(self) -> Operation:
        self.seen[self.name] += 1
        return self.name, self.seen[self.name]

    def is_behind(self, operation: Operation) -> bool:
        name, number = operation
        return self.seen[name] >= number


class Event:
    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def record(self, stream: Stream) -> None:
        self.seen = stream.seen.copy()


class Forgetful(Event):
    def record(self, stream: Stream) -> None:
        """Orders nothing."""


class Watch(ReferenceKernels):
    """The kernels of a store whose ring has such streams; also the timer of its copies.

    Attributes:
        wrong: what was not in order.
        num_copied, num_read: groups.
    """

    def __init__(
        self, store: ExpertStore, monkeypatch: pytest.MonkeyPatch, broken: str = ""
    ) -> None:
        self.main, copies, ring = Stream("main"), Stream("copies"), store.ring
        names = ("ready", "free", "in slots")
        kinds = {name: Forgetful if name == broken else Event for name in names}
        patched: Any = ring
        patched._stream, patched.timer = copies, self
        patched._ready = [kinds["ready"]() for _ in ring._buffers]
        patched._free = [kinds["free"]() for _ in ring._buffers]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.main)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patched._slots_stream, patched._in_slots = Stream("slots"), kinds["in slots"]()
        monkeypatch.setattr(ring_module, "copy_records", self._copies_to_slots)
        send = store.table.send

        def sends(layer: int) -> None:
            if not all(map(self.main.is_behind, self._to_slots)):
                self.wrong.append("slots are given away before they are filled")
            send(layer)

        monkeypatch.setattr(store.table, "send", sends)
        fill = ring.fill

        def fills(*args: Any) -> None:
            if not all(map(self.main.is_behind, self._to_slots)):
                self.wrong.append("slots are filled again before earlier copies have ended")
            fill(*args)

        monkeypatch.setattr(ring, "fill", fills)
        self._ring, self._fails_at = ring, 0
        self._written: dict[int, Operation] = {}
        self._readers: dict[int, list[Operation]] = defaultdict(list)
        self._to_slots: list[Operation] = []
        self.wrong: list[str] = []
        self.num_copied = self.num_read = 0

    def fail_at(self, num_read: int) -> None:
        self._fails_at = num_read

    def begin(self, stream: Any) -> None:
        index = self._ring._idle[0]
        before = [*self._readers.pop(index, []), *filter(None, [self._written.get(index)])]
        if not all(map(stream.is_behind, before)):
            self.wrong.append(f"buffer {index} is copied over")
        self._written[index] = stream.operation()
        self.num_copied += 1

    def end(self, stream: Any, num_bytes: int) -> None:
        """One operation stands for all of a group."""

    def _copies_to_slots(
        self, sources_N: torch.Tensor, targets_N: torch.Tensor, nbytes: int
    ) -> None:
        index, side = self._buffer_of(sources_N), self._ring._slots_stream
        if not all(map(side.is_behind, self._readers[index])):
            self.wrong.append("slots are filled before their readers have run")
        self._reads(index, side)
        self._to_slots.append(self._readers[index][-1])
        copy_records(sources_N, targets_N, nbytes)

    def _buffer_of(self, address_N: torch.Tensor) -> int:
        (found,) = (
            index for index in range(self._ring.num_buffers) if self._is_in(index, address_N)
        )
        return found

    def _is_in(self, index: int, address_N: torch.Tensor) -> bool:
        buffer = self._ring._buffers[index]
        first = buffer.data_ptr()
        return bool(((address_N >= first) & (address_N < first + buffer.numel())).any())

    def _reads(self, index: int, stream: Stream) -> None:
        if not stream.is_behind(self._written[index]):
            self.wrong.append(f"buffer {index} is read before it is there")
        self._readers[index].append(stream.operation())
        self.num_read += 1
        if self.num_read == self._fails_at:
            raise ZeroDivisionError

    def _reads_of(self, address_E: torch.Tensor) -> None:
        for index in range(self._ring.num_buffers):
            if self._is_in(index, address_E):
                self._reads(index, self.main)

    def add_experts(self, x_TH: Any, weights_TK: Any, address_E: Any, *args: Any, **named: Any):
        self._reads_of(address_E)
        super().add_experts(x_TH, weights_TK, address_E, *args, **named)

    def expert_outputs(self, x_TH: Any, ids_TK: Any, address_E: Any, *args: Any, **named: Any):
        self._reads_of(address_E)
        return super().expert_outputs(x_TH, ids_TK, address_E, *args, **named)


def run_prompts(monkeypatch: pytest.MonkeyPatch, broken: str = "") -> Watch:
    """Prompts one behind the other, of which the second is not wanted behind its second layer, and
    the third fails within one. Between two layers experts change places, as decode steps do."""
    store = make_store(layers(*[NUM_EXPERTS] * NUM_LAYERS), 9, staging_records=6)
    watch, stream = Watch(store, monkeypatch, broken), ExpertStream(store)
    scores = np.random.default_rng(0)
    policy: Any = SimpleNamespace(
        read=lambda *_: None, scores=lambda layer: scores.random(NUM_EXPERTS)
    )
    tee = Tee(policy, store)

    def prompt(seed: int, num_layers: int = NUM_LAYERS) -> None:
        for layer in range(num_layers):
            owned = {at: [(at + seed + layer + i) % NUM_EXPERTS for i in range(3)] for at in (0, 1)}
            store.place(resident(store, {**owned, 2: [seed, seed + 1, seed + 2]}))
            run = runner(store, use_ring=True, layer=layer, stream=stream, tee=tee)
            run._kernels = watch
            run.run([Block(*routed(store, size, seed)) for size in (MANY, 5)])

    prompt(0)
    prompt(1, num_layers=2)
    watch.fail_at(watch.num_read + 7)
    with pytest.raises(ZeroDivisionError):
        prompt(2)
    store.restore()
    prompt(3)
    stream.drop()
    assert store.ring.num_idle == store.ring.num_buffers
    assert watch.num_copied > 30 and watch.num_read > watch.num_copied
    return watch


def test_buffers_are_read_and_copied_over_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_prompts(monkeypatch).wrong == []


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("ready", ["is read before it is there"]),
        (
            "free",
            ["is copied over", "filled before their readers", "is read before it is there"],
        ),
        (
            "in slots",
            ["given away before they are filled", "filled again before earlier copies have ended"],
        ),
    ],
)
def test_the_control_without_an_event_it_shows(
    broken: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = run_prompts(monkeypatch, broken).wrong
    assert wrong and all(any(words in one for words in said) for one in wrong)
    assert all(any(words in one for one in wrong) for words in said)


@pytest.mark.parametrize(("broken", "num_wrong"), [("", 0), ("in slots", 1)])
def test_slots_are_restored_behind_copies_that_an_error_left_on_their_way(
    broken: str, num_wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(layers(NUM_EXPERTS), 3, staging_records=6)
    store.place(resident(store, {0: [0, 1, 2]}))
    watch = Watch(store, monkeypatch, broken)
    staged = store.ring.stage(0, [4, 7], record_bytes=store.layers[0].expert.record_bytes)
    store.ring.wait(staged)
    store.ring.computed(staged)
    store.tee(staged, [(7, 1)])
    store.ring.release(staged)
    store.restore()
    assert len(watch.wrong) == num_wrong and store.audit() == []


@pytest.mark.parametrize(("num_tokens", "is_behind"), [(0, False), (1, True), (5, True)])
def test_a_sum_reads_the_match_ahead_only_where_a_launch_lies_between(
    num_tokens: int, is_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch waits for the one before it, and for no other: see `kernels.dependent`."""
    store, asked = make_store(layers(NUM_EXPERTS)), []

    class Watching(ReferenceKernels):
        def combine(self, *args: Any, behind_experts: bool = False, **named: Any) -> torch.Tensor:
            asked.append(behind_experts)
            return super().combine(*args, **named)

    few = FewTokens(
        Watching(),
        store.layers[0].expert,
        Block(*routed(store, num_tokens)),
        fill_E=torch.zeros(NUM_EXPERTS, dtype=torch.int64),
        post_norm=None,
        behind_match=True,
    )
    few.total()
    assert asked == [is_behind]
