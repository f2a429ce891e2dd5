"""Memory that one thread reads into beside the records, and copies from it. Knows no files."""

from __future__ import annotations

import numpy as np
import torch

from hotset.checkpoint.reader import memory_of

_ALIGN = 64
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Scratch:
    """Pieces of one buffer, good until `reset`. New memory costs a page fault for each 4 KiB, so
    the buffer stays, and grows to the most that was in use at a time."""

    def __init__(self) -> None:
        self._bytes = torch.empty(_ALIGN, dtype=torch.uint8)
        self._memory = memory_of(self._bytes)
        self._used = 0
        self._beyond: list[torch.Tensor] = []

    def reset(self) -> None:
        """Nothing that was taken is needed any more."""
        self._beyond.clear()
        if self._used > len(self._bytes):
            self._bytes = torch.empty(self._used, dtype=torch.uint8)
            self._memory = memory_of(self._bytes)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous, with whatever it holds."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        memory = self.memory(nbytes)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def memory(self, nbytes: int) -> memoryview:
        """Of so many bytes."""
        start = self._used
        self._used += -(-nbytes // _ALIGN) * _ALIGN
        if self._used > len(self._bytes):
            self._beyond.append(torch.empty(nbytes, dtype=torch.uint8))
            return memory_of(self._beyond[-1])
        return self._memory[start : start + nbytes]


def copy_bits(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copies elements into a view of the same shape, converted where dtypes differ.

    On a CPU by one thread, without Python's lock: torch would cut it up for threads of its own
    beside the loader's.
    """
    same = source.dtype == destination.dtype and destination.device.type == "cpu"
    if not same or source.device.type != "cpu":
        destination.copy_(source)
        return
    bits = _SAME_SIZE[source.itemsize]
    np.copyto(destination.detach().view(bits).numpy(), source.detach().view(bits).numpy())
