"""How a number of slots is split over the MoE layers: evenly, one to each layer in turn.

Knows layers and record sizes, no budget and no traffic. The order is fixed, and a smaller number
of slots is always a prefix of a larger one: more memory never takes a slot away from any layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from hotset.core.geometry import MoELayer
from hotset.core.plan import PlannedPool


class SlotSplit:
    """The fixed order in which slots are handed out, and what they add up to.

    Each round gives one slot to every layer that has experts left without one. Layers of
    different record sizes share the rounds, so each pool is split evenly as well.
    """

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self._layers = tuple(layers)
        self._order = tuple(_rounds(self._layers))
        sizes = (self._layers[index].expert.record_bytes for index in self._order)
        self._bytes = (0, *accumulate(sizes))

    @property
    def most(self) -> int:
        """One slot for every expert."""
        return len(self._order)

    def num_bytes(self, num_slots: int) -> int:
        """Bytes of the first `num_slots` slots."""
        return self._bytes[num_slots]

    def most_within(self, num_bytes: int) -> int:
        """Most slots that take no more than `num_bytes`."""
        return max(0, bisect_right(self._bytes, num_bytes) - 1)

    def per_layer(self, num_slots: int) -> tuple[int, ...]:
        """Slots of each layer when there are `num_slots` of them."""
        counts = Counter(self._order[:num_slots])
        return tuple(counts[index] for index in range(len(self._layers)))

    def pools(self, num_slots: int) -> tuple[PlannedPool, ...]:
        """The same slots by record size, in the order in which the sizes first appear."""
        counts = self.per_layer(num_slots)
        members: dict[int, list[int]] = {}
        for index, layer in enumerate(self._layers):
            members.setdefault(layer.expert.record_bytes, []).append(index)
        return tuple(
            PlannedPool(size, tuple(indices), sum(counts[index] for index in indices))
            for size, indices in members.items()
        )


def _rounds(layers: tuple[MoELayer, ...]) -> Iterator[int]:
    for already in range(max((layer.num_experts for layer in layers), default=0)):
        for index, layer in enumerate(layers):
            if layer.num_experts > already:
                yield index
