"""The one place that copies records: into slots, and through staging buffers in prefill.

A ring buffer is a temporary slot: kernels get its addresses and run as for any other. Copies use
the copy engine, neighbouring records in one copy (single copies of 1.5 MiB reach 50.1 GB/s where
long ones reach 55.3), on a stream of their own, so that one group crosses the link while the
previous one computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from hotset.experts.arena import HostArena
from hotset.experts.slots import SlotMemory


@dataclass(frozen=True)
class Fill:
    """One record to copy from the arena into a slot."""

    layer: int
    expert: int
    slot: int


@dataclass(frozen=True)
class Group:
    """Experts that lie in a staging buffer now.

    Attributes:
        experts: their ids.
        address_E: [E] int64 on the device, their staging addresses, 0 for every other expert.
    """

    experts: tuple[int, ...]
    address_E: torch.Tensor


class Ring:
    """Copies records of one arena to one device.

    Args:
        arena: where records come from.
        device: where they go.
        num_records: staging room in records; 0 when nothing is ever streamed. Two buffers share
            it, so it is at least 2 otherwise.
        record_bytes: the largest record.

    Attributes:
        copied_bytes: bytes copied from the arena so far, slots and staging together.
    """

    num_buffers = 2

    def __init__(
        self, arena: HostArena, *, device: torch.device, num_records: int, record_bytes: int
    ) -> None:
        assert num_records == 0 or num_records >= self.num_buffers
        self._arena = arena
        self._device = device
        self._buffer_bytes = num_records // self.num_buffers * record_bytes
        self._buffers = [
            torch.empty(self._buffer_bytes, dtype=torch.uint8, device=device)
            for _ in range(self.num_buffers if num_records else 0)
        ]
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._ready = [torch.cuda.Event() if on_gpu else None for _ in self._buffers]
        self._free = [torch.cuda.Event() if on_gpu else None for _ in self._buffers]
        self.copied_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the staging buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

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

    def stream(
        self, layer: int, experts: Sequence[int], *, num_experts: int, record_bytes: int
    ) -> Iterator[Group]:
        """Brings records through the staging buffers, group by group, in ascending id.

        While the caller works on a group (on the current stream), the next one is copied. A group
        is valid until the next one is asked for.

        Args:
            layer: MoE layer.
            experts: ids to bring, each once.
            num_experts: E of the layer.
            record_bytes: record size of the layer.
        """
        per_group = self._buffer_bytes // record_bytes
        assert per_group > 0, "the plan gave no staging room"
        ids = sorted(experts)
        groups = [ids[i : i + per_group] for i in range(0, len(ids), per_group)]
        table = self._addresses(groups, num_experts, record_bytes)
        if self._stream is not None:
            # The buffers may still be read by what the current stream has queued.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for index, group in enumerate(groups):
            if index == 0:
                self._copy(layer, group, 0, record_bytes)
            if index + 1 < len(groups):
                self._copy(layer, groups[index + 1], index + 1, record_bytes)
            self._wait_ready(index)
            yield Group(tuple(group), table[index])
            self._mark_free(index)

    def _addresses(
        self, groups: list[list[int]], num_experts: int, record_bytes: int
    ) -> torch.Tensor:
        """[G, E] int64 on the device: staging addresses of each group, 0 elsewhere."""
        table = torch.zeros((len(groups), num_experts), dtype=torch.int64)
        for index, group in enumerate(groups):
            base = self._buffers[index % self.num_buffers].data_ptr()
            table[index, group] = base + torch.arange(len(group)) * record_bytes
        return table.to(self._device)

    def _copy(self, layer: int, group: list[int], index: int, record_bytes: int) -> None:
        slot = index % self.num_buffers
        buffer, free, ready = self._buffers[slot], self._free[slot], self._ready[slot]
        if self._stream is None:
            context: AbstractContextManager[object] = nullcontext()
        else:
            if index >= self.num_buffers:
                assert free is not None
                self._stream.wait_event(free)
            context = torch.cuda.stream(self._stream)
        with context:
            start = 0
            while start < len(group):
                end = start + 1
                while end < len(group) and group[end] == group[end - 1] + 1:
                    end += 1
                source = self._arena.record(layer, group[start], end - start)
                target = buffer[start * record_bytes : end * record_bytes]
                target.copy_(source, non_blocking=True)
                self.copied_bytes += source.numel()
                start = end
            if ready is not None:
                ready.record(self._stream)

    def _wait_ready(self, index: int) -> None:
        ready = self._ready[index % self.num_buffers]
        if ready is not None:
            torch.cuda.current_stream(self._device).wait_event(ready)

    def _mark_free(self, index: int) -> None:
        free = self._free[index % self.num_buffers]
        if free is not None:
            free.record(torch.cuda.current_stream(self._device))


def _adjacent(first: Fill, second: Fill, slots: SlotMemory) -> bool:
    return (
        second.layer == first.layer
        and second.expert == first.expert + 1
        and slots.neighbours(first.slot, second.slot)
    )
