"""Which records of a layer come through the staging ring, in which groups, and when.

A layer's experts are cut into ranges of ascending ids. A group is one range: what is missing of it
lies in a staging buffer, the rest where it is, and to a kernel they are all addresses. While one
group is computed on, the next ones cross the link, and behind a layer's last group the next
layer's first ones, whose routing is not known yet: they are computed on before the host has learnt
it. So are a prompt's very first ones, where shorter prompts used all. Knows ids, residency, buffers
and how long a prompt is; nothing of its tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from hotset.core.slot_pools import BoolArray
from hotset.core.staging import PREFETCH_SHARE
from hotset.experts.ring import Staged
from hotset.experts.store import ExpertStore


@dataclass(frozen=True)
class _Range:
    """Experts `first` .. `stop` - 1, of which `experts` are brought."""

    first: int
    stop: int
    experts: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Experts of one range of ids, ready to be read.

    Attributes:
        first, stop: the range.
        address_E: [E] int64 on the device; 0 for experts outside the range.
        staged: those that lie in a staging buffer; `None` if none does.
    """

    first: int
    stop: int
    address_E: torch.Tensor
    staged: Staged | None


@dataclass(frozen=True)
class Need:
    """What a layer routes to.

    Attributes:
        used_E: experts that have tokens.
        use_ring: what is missing of them is staged; otherwise it is read where it lies.
    """

    used_E: BoolArray
    use_ring: bool

    @property
    def num_used(self) -> int:
        return int(self.used_E.sum())


# Of the groups that are here so many are given out before the host asks what a layer routes to:
# enough for the device to compute on while the host brings the policy up to date, few enough for
# their buffers to be filled again in time.
_GIVEN_BEFORE = 2

# (records of a group, first expert behind it)
Behind = Callable[[Staged, int], None]


class ExpertStream:
    """Brings missing records of one layer after the other.

    Args:
        store: records, slots and the ring.
        overlap: copy groups while others are computed on; without it each waits for the one before
            it, which is for comparison.
    """

    def __init__(self, store: ExpertStore, *, overlap: bool = True) -> None:
        self._store, self._ring, self._overlap = store, store.ring, overlap
        self._early: deque[Staged] = deque()  # of the layer that comes next
        # Tokens of the prompt that runs, and those with which one uses all of the first layer.
        self._num_tokens, self._suffices = 0, math.inf

    def room(self, layer: int) -> int:
        """Records of a layer that one buffer holds."""
        return self._ring.room(self._store.layers[layer].expert.record_bytes)

    def begin(self, num_tokens: int) -> None:
        """A prompt has come to its first layer, whose routing is not known yet. No other layer
        foretells what it uses, but shorter prompts do: where they used nearly all of it, records
        cross while the device is at its attention."""
        if self._early and self._early[0].layer != 0:
            self.drop()
        self._num_tokens = num_tokens
        if self._overlap and num_tokens >= self._suffices:
            self.prefetch(0)

    def prefetch(self, layer: int) -> None:
        """Sends the first missing records of a layer on their way, as far as buffers are idle."""
        if layer >= len(self._store.layers):
            return
        assert not self._early or self._early[0].layer == layer
        missing_E = ~self._store.placement.resident[layer, : self._store.layers[layer].num_experts]
        if self._early:
            missing_E[: self._early[-1].experts[-1] + 1] = False
        missing = np.flatnonzero(missing_E).tolist()
        size = self._group_size(layer, len(missing))
        while missing and self._ring.num_idle:
            self._early.append(self._stage(layer, missing[:size]))
            missing = missing[size:]

    def drop(self) -> None:
        """Gives up what was prefetched."""
        while self._early:
            self._ring.release(self._early.popleft())

    @contextmanager
    def groups(
        self, layer: int, need: Callable[[], Need], behind: Behind | None = None
    ) -> Iterator[Iterator[Group]]:
        """All experts of a layer, group by group in ascending id.

        A group is valid until the next one is asked for; that happens on the current stream. The
        first of what is here already come before anything is asked of `need`.

        Args:
            layer: MoE layer.
            need: what the layer routes to; may wait for the device. No other expert crosses the
                link from then on.
            behind: called for each staged group once `need` is known and what reads the group is
                queued, with its records and the first expert behind it.
        """
        if self._early and self._early[0].layer != layer:
            self.drop()
        early, self._early = self._early, deque()
        with closing(self._all(layer, need, behind, early)) as groups:
            yield groups

    def _all(
        self,
        layer: int,
        need: Callable[[], Need],
        behind: Behind | None,
        early: deque[Staged],
    ) -> Generator[Group]:
        """Every idle buffer is kept on its way ahead of the group that is computed on.

        What the layer routes to is asked for as soon as some of what is here has been given out:
        while the device computes on it, the host sees to what comes behind.
        """
        resident_E = self._store.placement.resident[layer, : self._store.layers[layer].num_experts]
        here, first = self._early_ranges(early, resident_E)
        ahead, ranges = deque(early), deque(here)
        todo: deque[tuple[int, ...]] = deque()
        given: deque[tuple[Staged, int]] = deque()  # computed on, and not let go yet
        staged, goes_on = None, False
        num_before = min(len(here), _GIVEN_BEFORE)
        try:
            for num_given in count():
                if num_given == num_before:
                    later, goes_on = self._later(layer, need(), first, resident_E)
                    ranges += later
                    todo += [part.experts for part in later if part.experts]
                if num_given >= num_before:
                    self._let_go(given, behind)
                if not ranges:
                    break
                self._send(layer, todo, ahead)
                if goes_on and not todo:
                    self.prefetch(layer + 1)
                part = ranges.popleft()
                staged = ahead.popleft() if part.experts else None
                if staged is not None:
                    self._ring.wait(staged)
                yield Group(part.first, part.stop, self._addresses(layer, part, staged), staged)
                if staged is not None:
                    self._ring.computed(staged)
                    given.append((staged, part.stop))
                    staged = None
            if goes_on:  # into buffers that were not idle before
                self.prefetch(layer + 1)
        finally:  # after an error, here or in the caller
            if staged is not None:
                self._ring.computed(staged)
                self._ring.release(staged)
            for left in (*ahead, *(one for one, _ in given)):
                self._ring.release(left)

    def _let_go(self, given: deque[tuple[Staged, int]], behind: Behind | None) -> None:
        while given:
            if behind is not None:
                behind(*given[0])
            self._ring.release(given.popleft()[0])

    def _send(self, layer: int, todo: deque[tuple[int, ...]], ahead: deque[Staged]) -> None:
        """Groups set off as far as buffers are idle; without overlap one, behind all else."""
        while todo and self._ring.num_idle and (self._overlap or not ahead):
            if not self._overlap and self._store.device.type == "cuda":
                torch.cuda.synchronize(self._store.device)
            ahead.append(self._stage(layer, todo.popleft()))

    def _later(
        self, layer: int, known: Need, first: int, resident_E: BoolArray
    ) -> tuple[list[_Range], bool]:
        """Ranges of the experts from `first` on, and whether the next layer is expected to be as
        this one."""
        missing = np.flatnonzero(known.used_E & ~resident_E & known.use_ring)
        ranges = self._ranges(layer, first, missing[missing >= first].tolist())
        all_used = known.use_ring and known.num_used >= PREFETCH_SHARE * len(resident_E)
        if layer == 0 and all_used:
            self._suffices = min(self._suffices, self._num_tokens)
        elif layer == 0:
            self._suffices = max(self._suffices, self._num_tokens + 1)
        return ranges, all_used and self._overlap

    @staticmethod
    def _early_ranges(early: Sequence[Staged], resident_E: BoolArray) -> tuple[list[_Range], int]:
        """Ranges of what was prefetched, and the first expert behind them.

        Nothing more is brought of them: where residency has changed since, a record is read in
        place. The last range is the layer's last if nothing is missing behind it.
        """
        ranges, first = [], 0
        for staged in early:
            stop = staged.experts[-1] + 1
            if staged is early[-1] and resident_E[stop:].all():
                stop = len(resident_E)
            ranges.append(_Range(first, stop, staged.experts))
            first = stop
        return ranges, first

    def _ranges(self, layer: int, first: int, missing: list[int]) -> list[_Range]:
        """Cuts the experts from `first` on so that what is missing of each range fits a buffer."""
        num_experts = self._store.layers[layer].num_experts
        size = self._group_size(layer, len(missing))
        parts = [tuple(missing[start : start + size]) for start in range(0, len(missing), size)]
        ranges = []
        for part in parts:
            ranges.append(_Range(first, part[-1] + 1, part))
            first = part[-1] + 1
        if first < num_experts:
            last = ranges.pop() if ranges else _Range(first, first, ())
            ranges.append(_Range(last.first, num_experts, last.experts))
        return ranges

    def _group_size(self, layer: int, num_records: int) -> int:
        """Records of a group: as few groups as possible, as even as possible."""
        room = self.room(layer)
        assert room > 0 or num_records == 0, "the plan gave no staging room"
        num_groups = -(-num_records // room) if num_records else 1
        return max(1, -(-num_records // num_groups))

    def _stage(self, layer: int, experts: Sequence[int]) -> Staged:
        size = self._store.layers[layer].expert.record_bytes
        return self._ring.stage(layer, experts, record_bytes=size)

    def _addresses(self, layer: int, part: _Range, staged: Staged | None) -> torch.Tensor:
        """[E]: of the table within the range, of the buffer where that has the record."""
        table = self._store.table
        num_experts = self._store.layers[layer].num_experts
        if staged is None and (part.first, part.stop) == (0, num_experts):
            return table.row(layer)
        staged_E = np.zeros(num_experts, dtype=np.int64)  # 0: as the table says
        if staged is not None:
            places = np.arange(len(staged.experts)) * staged.record_bytes
            staged_E[list(staged.experts)] = staged.address + places
        return table.choose(layer, staged_E, first=part.first, stop=part.stop)
