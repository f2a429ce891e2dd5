"""VRAM slots: room for one record each, one allocation per record size. Owns memory, not meaning.

Slots are numbered as in `core.slot_pools.SlotPools`. Which expert a slot belongs to is the
placement's business.
"""

from __future__ import annotations

import numpy as np
import torch

from hotset.core.slot_pools import IntArray, SlotPools

# Every byte 0xFF is a NaN in FP32, BF16, FP16 and FP8 E4M3 alike.
POISON = 0xFF


class SlotMemory:
    """The slots of an engine, allocated once and never grown.

    Args:
        pools: how many slots of which size, and their numbers.
        device: where the memory lies.
        poison: fill unowned slots with NaN, so that a read of one cannot stay unnoticed.
    """

    def __init__(self, pools: SlotPools, *, device: torch.device, poison: bool = False) -> None:
        self._memory = [
            torch.empty((pool.num_slots, pool.record_bytes), dtype=torch.uint8, device=device)
            for pool in pools.pools
        ]
        self._where = [
            (index, row) for index, pool in enumerate(pools.pools) for row in range(pool.num_slots)
        ]
        self._addresses = np.array([self._address(*where) for where in self._where], dtype=np.int64)
        self._poison = poison
        if poison:
            for memory in self._memory:
                memory.fill_(POISON)

    @property
    def num_slots(self) -> int:
        return len(self._where)

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for memory in self._memory)

    def view(self, slot: int, num_slots: int = 1) -> torch.Tensor:
        """uint8 view of a slot, or of `num_slots` neighbours of one pool side by side."""
        pool, row = self._where[slot]
        return self._memory[pool][row : row + num_slots].view(-1)

    def neighbours(self, slot: int, other: int) -> bool:
        """Whether `other` lies directly behind `slot` in memory."""
        return other == slot + 1 and self._where[slot][0] == self._where[other][0]

    def address(self, slot: int) -> int:
        """Device address of a slot."""
        return int(self._addresses[slot])

    def addresses(self, slots: IntArray) -> IntArray:
        """Device addresses of slots, int64 of the same shape."""
        found: IntArray = self._addresses[slots]
        return found

    def release(self, slot: int) -> None:
        """Called when a slot loses its owner; poisons it where that is asked for."""
        if self._poison:
            self.view(slot).fill_(POISON)

    def _address(self, pool: int, row: int) -> int:
        memory = self._memory[pool]
        return memory.data_ptr() + row * memory.shape[1]
