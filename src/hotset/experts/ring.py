"""The one place that copies records: into slots, and through staging buffers in prefill.

A ring buffer is a temporary slot: kernels get its addresses and run as for any other. Copies from
the arena use the copy engine, neighbouring records in one copy (single copies of 1.5 MiB reach
50.1 GB/s where long ones reach 55.3), on a stream of their own, so that groups cross the link
while others are computed on. What goes on from a buffer into slots goes in one launch, on another
stream of its own. Which group comes when is its callers' business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hotset.experts.arena import HostArena
from hotset.experts.slots import SlotMemory
from hotset.experts.transfer import copy_up, sent
from hotset.kernels.gather import copy_records

# Records of one launch from a buffer into slots.
_LAUNCHED = 64


@dataclass(frozen=True)
class Fill:
    """One record to copy from the arena into a slot."""

    layer: int
    expert: int
    slot: int


@dataclass(frozen=True)
class Staged:
    """Records that lie in a staging buffer, or are on their way to it.

    Attributes:
        layer, experts: which; `experts` ascending.
        buffer: where.
        record_bytes: size of one.
        address: of the first; the others follow without gaps.
    """

    layer: int
    experts: tuple[int, ...]
    buffer: int
    record_bytes: int
    address: int


class CopyTimer(Protocol):
    """Told when the copies of a group set off and end, on the stream that they are ordered on."""

    def begin(self, stream: torch.cuda.Stream | None) -> None: ...

    def end(self, stream: torch.cuda.Stream | None, num_bytes: int) -> None: ...


class Ring:
    """Copies records of one arena to one device.

    Args:
        arena: where records come from.
        device: where they go.
        num_records: staging room in records; 0 when nothing is ever staged. The buffers share it
            evenly, so it is at least one for each of them otherwise.
        record_bytes: the largest record.
        num_buffers: one is computed on while the others are filled.

    Attributes:
        copied_bytes: bytes copied from the arena so far, slots and staging together.
        timer: of the copies into staging buffers, for benchmarks.
    """

    def __init__(
        self,
        arena: HostArena,
        *,
        device: torch.device,
        num_records: int,
        record_bytes: int,
        num_buffers: int = 2,
    ) -> None:
        assert num_buffers >= 2 and (num_records == 0 or num_records >= num_buffers)
        self._arena = arena
        self._device = device
        self._buffer_bytes = num_records // num_buffers * record_bytes
        self._buffers = [
            torch.empty(self._buffer_bytes, dtype=torch.uint8, device=device)
            for _ in range(num_buffers if num_records else 0)
        ]
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        # Copies into slots run beside what is computed meanwhile.
        self._slots_stream = torch.cuda.Stream(device) if on_gpu else None
        self._in_slots = torch.cuda.Event() if on_gpu else None
        self._ready = [torch.cuda.Event() if on_gpu else None for _ in self._buffers]
        self._free = [torch.cuda.Event() if on_gpu else None for _ in self._buffers]
        for free in self._free:
            # The memory may have been another tensor's, still in use by what is queued.
            if free is not None:
                free.record(torch.cuda.current_stream(device))
        self._idle = deque(range(len(self._buffers)))
        self.copied_bytes = 0
        self.timer: CopyTimer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the staging buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    @property
    def num_buffers(self) -> int:
        return len(self._buffers)

    @property
    def num_idle(self) -> int:
        """Buffers that hold nothing and are promised to nobody."""
        return len(self._idle)

    def room(self, record_bytes: int) -> int:
        """Records of that size that one buffer holds."""
        return self._buffer_bytes // record_bytes

    def fill(self, fills: Sequence[Fill], slots: SlotMemory) -> None:
        """Copies records into slots, ordered on the current stream."""
        ordered = sorted(fills, key=lambda f: (f.layer, f.expert))
        start = 0
        while start < len(ordered):
            end = start + 1
            while end < len(ordered) and _adjacent(ordered[end - 1], ordered[end], slots):
                end += 1
            first, count = ordered[start], end - start
            source = self._arena.record(first.layer, first.expert, count)
            slots.view(first.slot, count).copy_(source, non_blocking=True)
            self.copied_bytes += source.numel()
            start = end

    def stage(self, layer: int, experts: Sequence[int], *, record_bytes: int) -> Staged:
        """Sends records on their way into an idle buffer, which is then `release`d once.

        Args:
            layer: MoE layer.
            experts: ids to bring, ascending, each once; at least one, at most `room`.
            record_bytes: record size of the layer.
        """
        assert 0 < len(experts) <= self.room(record_bytes), (len(experts), self._buffer_bytes)
        index = self._idle[0]
        buffer, free, ready = self._buffers[index], self._free[index], self._ready[index]
        if self._stream is not None:
            assert free is not None
            self._stream.wait_event(free)
        if self.timer is not None:
            self.timer.begin(self._stream)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            for start, end in _runs(experts):
                source = self._arena.record(layer, experts[start], end - start)
                self._copy(source, buffer[start * record_bytes : end * record_bytes])
                self.copied_bytes += source.numel()
        if self.timer is not None:
            self.timer.end(self._stream, len(experts) * record_bytes)
        if ready is not None:
            ready.record(self._stream)
        # Last: if this was interrupted the buffer is still idle.
        self._idle.popleft()
        return Staged(layer, tuple(experts), index, record_bytes, buffer.data_ptr())

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.numel() == target.numel(), (source.shape, target.shape)
        if self._device.type != "cuda":
            target.copy_(source)
            return
        assert self._stream is not None
        copy_up(source.data_ptr(), target.data_ptr(), source.numel(), self._stream)

    def wait(self, staged: Staged) -> None:
        """What the current stream runs from now on finds the records there."""
        ready = self._ready[staged.buffer]
        if ready is not None:
            torch.cuda.current_stream(self._device).wait_event(ready)

    def computed(self, staged: Staged) -> None:
        """Behind what the current stream has queued by now only `copy_to_slots` reads them."""
        free = self._free[staged.buffer]
        if free is not None:
            free.record(torch.cuda.current_stream(self._device))

    def release(self, staged: Staged) -> None:
        """The buffer is idle again once nothing reads it any more: whoever has read it has called
        `computed`.

        Its own copies may still be on their way, as when nobody wants them any more: the next ones
        come behind them on their stream.
        """
        assert staged.buffer not in self._idle
        self._idle.append(staged.buffer)

    def copy_to_slots(
        self, staged: Staged, experts: Sequence[int], slots: SlotMemory, where: Sequence[int]
    ) -> None:
        """Copies records that are `computed` into slots, device to device, beside what the current
        stream has queued since. See `wait_for_slots`.

        Args:
            staged: where the records are.
            experts: whose, each of them staged.
            slots: where they go; nothing that was queued since reads what is there.
            where: the slot of each, all different.
        """
        free = self._free[staged.buffer]
        if self._slots_stream is None:
            self._copy_to_slots(staged, experts, slots, where)
            return
        assert free is not None and self._in_slots is not None
        self._slots_stream.wait_event(free)
        try:
            with torch.cuda.stream(self._slots_stream):
                self._copy_to_slots(staged, experts, slots, where)
        finally:  # some may be on their way when this is interrupted
            free.record(self._slots_stream)
            self._in_slots.record(self._slots_stream)

    def wait_for_slots(self) -> None:
        """What the current stream runs from now on finds in slots what was copied there."""
        if self._in_slots is not None:
            torch.cuda.current_stream(self._device).wait_event(self._in_slots)

    def _copy_to_slots(
        self, staged: Staged, experts: Sequence[int], slots: SlotMemory, where: Sequence[int]
    ) -> None:
        assert set(experts) <= set(staged.experts), (experts, staged.experts)
        places = np.searchsorted(staged.experts, experts)
        targets = slots.addresses(np.array(where, dtype=np.int64))
        for first in range(0, len(places), _LAUNCHED):
            some = slice(first, first + _LAUNCHED)
            num = len(places[some])
            # Rows of one length, however many addresses are in them: both begin aligned, and a
            # row that does not would be another program to compile.
            addresses = np.zeros((2, _LAUNCHED), dtype=np.int64)
            addresses[0, :num] = staged.address + places[some] * staged.record_bytes
            addresses[1, :num] = targets[some]
            sources_N, targets_N = sent(addresses, self._device)[:, :num]
            copy_records(sources_N, targets_N, staged.record_bytes)


def _runs(experts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of each stretch of neighbouring ids."""
    start = 0
    for end in range(1, len(experts) + 1):
        if end == len(experts) or experts[end] != experts[end - 1] + 1:
            yield start, end
            start = end


def _adjacent(first: Fill, second: Fill, slots: SlotMemory) -> bool:
    return (
        second.layer == first.layer
        and second.expert == first.expert + 1
        and slots.neighbours(first.slot, second.slot)
    )
