"""How many slots and staging records a number of bytes gives. Pure arithmetic on records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotset.core.errors import CapacityError
from hotset.core.geometry import MoELayer
from hotset.core.sizing import largest, ring_records
from hotset.core.slot_pools import SlotPools
from hotset.core.slot_split import SlotSplit
from hotset.core.units import format_bytes


@dataclass(frozen=True)
class Sizes:
    """What fits a budget.

    Attributes:
        pools: the slots.
        slots_L: of each layer.
        staging_records: of the ring, in the largest records.
    """

    pools: SlotPools
    slots_L: tuple[int, ...]
    staging_records: int


def sizes_within(layers: Sequence[MoELayer], num_bytes: int, *, use_ring: bool) -> Sizes:
    """The most slots, with a staging ring to suit them, that take no more than `num_bytes`.

    Raises:
        CapacityError: not even the smallest ring fits.
    """
    split = SlotSplit(layers)
    widest = max(layer.num_experts for layer in layers)
    largest_bytes = max(layer.expert.record_bytes for layer in layers)

    def ring(num_slots: int) -> int:
        return ring_records(num_slots, split.most, widest_layer=widest) if use_ring else 0

    def needed(num_slots: int) -> int:
        return split.num_bytes(num_slots) + ring(num_slots) * largest_bytes

    num_slots = split.most
    if needed(num_slots) > num_bytes:  # it has no ring; of the others, fewer take less
        found = largest(lambda count: needed(count) <= num_bytes, 0, split.most - 1)
        if found is None:
            raise CapacityError(
                f"`vram` is {format_bytes(num_bytes)}, the least is {format_bytes(needed(0))}: "
                "two staging buffers of one expert each",
                hint='give more, or read experts in place: `"staging": "in-place"`',
                option="vram",
            )
        num_slots = found
    pools = SlotPools.build(
        num_experts=[layer.num_experts for layer in layers],
        record_bytes=[layer.expert.record_bytes for layer in layers],
        num_slots={pool.record_bytes: pool.num_slots for pool in split.pools(num_slots)},
    )
    return Sizes(pools, split.per_layer(num_slots), ring(num_slots))
