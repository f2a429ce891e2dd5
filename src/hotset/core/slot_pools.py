"""All slots, numbered through, in pools by record size. Knows sizes and counts, not owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotset.core.errors import ConfigError

IntArray = NDArray[np.integer]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class SlotPool:
    """Slots `first_slot .. first_slot + num_slots - 1`, each of room for `record_bytes`."""

    record_bytes: int
    first_slot: int
    num_slots: int


@dataclass(frozen=True)
class SlotPools:
    """All slots, one pool per record size, and the layers that draw on each.

    Attributes:
        num_experts: experts of each layer, length L.
        pools: in ascending record size; their slots are numbered through, 0..S-1.
        pool_of_layer: index into `pools` of each layer, length L.
        num_slot_only: of each layer, how many experts, the last ones by id, have no other place
            than a slot, length L; empty where all have a host copy.
    """

    num_experts: tuple[int, ...]
    pools: tuple[SlotPool, ...]
    pool_of_layer: tuple[int, ...]
    num_slot_only: tuple[int, ...] = ()

    @classmethod
    def build(
        cls,
        *,
        num_experts: Sequence[int],
        record_bytes: Sequence[int],
        num_slots: Mapping[int, int],
        num_slot_only: Sequence[int] = (),
    ) -> SlotPools:
        """Numbers the slots.

        Args:
            num_experts: experts of each layer, length L.
            record_bytes: record size of each layer, length L.
            num_slots: slots per record size; a size that is not named has none.
            num_slot_only: see the attribute.

        Raises:
            ConfigError: a size without a layer, or a negative count.
        """
        sizes = sorted(set(record_bytes))
        for size, count in num_slots.items():
            if size not in sizes or count < 0:
                raise ConfigError(
                    f"{count} slots for records of {size} bytes",
                    hint=f"record sizes of this model: {', '.join(map(str, sizes))}",
                )
        pools, first = [], 0
        for size in sizes:
            pools.append(SlotPool(size, first, num_slots.get(size, 0)))
            first += pools[-1].num_slots
        of_layer = tuple(map(sizes.index, record_bytes))
        return cls(tuple(num_experts), tuple(pools), of_layer, tuple(num_slot_only))

    @classmethod
    def uniform(cls, num_experts: Sequence[int], slots_per_layer: Sequence[int]) -> SlotPools:
        """One pool that has room for `slots_per_layer` of equal records."""
        return cls.build(
            num_experts=num_experts,
            record_bytes=[1] * len(num_experts),
            num_slots={1: int(sum(slots_per_layer))},
        )

    @property
    def num_slots(self) -> int:
        return sum(pool.num_slots for pool in self.pools)

    @property
    def max_experts(self) -> int:
        return max(self.num_experts)

    @property
    def slot_only(self) -> list[tuple[int, int]]:
        """(layer, expert) of every expert without a host copy, ascending."""
        return [
            (layer, expert)
            for layer, count in enumerate(self.num_slot_only)
            for expert in range(self.num_experts[layer] - count, self.num_experts[layer])
        ]

    def layers_of(self, pool: int) -> list[int]:
        return [layer for layer, owner in enumerate(self.pool_of_layer) if owner == pool]

    def split_evenly(self) -> IntArray:
        """Slots per layer, [L] int64: each pool spread over its layers, earlier layers first.

        A layer gets no more slots than it has experts; what it cannot use goes to the others.
        """
        share = np.zeros(len(self.num_experts), dtype=np.int64)
        for index, pool in enumerate(self.pools):
            left, open_layers = pool.num_slots, self.layers_of(index)
            while left > 0 and open_layers:
                each, rest = divmod(left, len(open_layers))
                for position, layer in enumerate(open_layers):
                    want = each + (position < rest)
                    got = min(want, self.num_experts[layer] - int(share[layer]))
                    share[layer] += got
                    left -= got
                open_layers = [
                    layer for layer in open_layers if share[layer] < self.num_experts[layer]
                ]
        return share
