"""The host's mirror of who owns which slot, and the match rule that changes owners within a step.

Knows slot numbers, layers and experts; refuses to know addresses, bytes, scores or wishes' reasons.
The device applies the same rule to the same routed ids, so that this mirror can be brought up to
date later, without asking the device.

Letters: L MoE layers, E experts of the widest layer, X spare columns, N routed ids of a layer in
one step, V victims, S slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hotset.core.errors import CapacityError
from hotset.core.slot_pools import BoolArray, IntArray, SlotPools

_UNSIGNED: dict[int, type[np.unsignedinteger]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}
_NO_POSITION = np.iinfo(np.int64).max
_POSITIONS = np.arange(128)  # a policy has at most 127 victims


@dataclass(frozen=True)
class Matches:
    """What one step changes and what it hit, for all layers.

    Attributes:
        layer, expert, victim, slot: [M] int64; expert takes the slot of victim. Ordered by layer,
            then by expert.
        routed_LN: bool, true once for each distinct expert that a layer routed.
        hit_LN: bool, those of them that had a slot when the layer began.
    """

    layer: IntArray
    expert: IntArray
    victim: IntArray
    slot: IntArray
    routed_LN: BoolArray
    hit_LN: BoolArray

    @property
    def num_routed(self) -> int:
        return int(np.count_nonzero(self.routed_LN))

    @property
    def num_hits(self) -> int:
        return int(np.count_nonzero(self.hit_LN))

    def __len__(self) -> int:
        return len(self.layer)


class Placement:
    """Who owns which slot.

    Args:
        pools: the slots and the layers that may use them.
        num_spare: X. Columns E..E+X-1 of a layer stand for empty slots lent to it (`lend`): named
            as a victim, such a column gives its slot to a missing expert and is gone. They are
            never routed, because routed ids are below the layer's number of experts.

    Attributes:
        slot_of: [L, E+X] int32, the slot of each expert, -1 without one.
        resident: [L, E+X] bool, `slot_of >= 0`.
        pinned: [L, E+X] bool, experts without a host copy; they keep their slot for good.
    """

    def __init__(self, pools: SlotPools, *, num_spare: int = 0) -> None:
        self.pools = pools
        self.num_spare = num_spare
        self.num_experts = np.asarray(pools.num_experts, dtype=np.int64)
        self._num_experts_L1 = self.num_experts[:, None].astype(np.uint64)
        num_layers, self._width = len(pools.num_experts), pools.max_experts + num_spare
        self.slot_of = np.full((num_layers, self._width), -1, dtype=np.int32)
        # One cell more than there are experts: padded ids end there, and it is never resident.
        self._resident = np.zeros(num_layers * self._width + 1, dtype=np.bool_)
        self.resident = self._resident[:-1].reshape(num_layers, self._width)
        self.pinned = np.zeros((num_layers, self._width), dtype=np.bool_)
        self._owner = np.full(pools.num_slots, -1, dtype=np.int64)
        self._free = [
            list(range(pool.first_slot + pool.num_slots - 1, pool.first_slot - 1, -1))
            for pool in pools.pools
        ]
        # First of all and in one order, so that they have the same slots in every placement.
        for layer, expert in pools.slot_only:
            self.assign(layer, expert)
            self.pin(layer, expert)
        # The last cell of the scratch mask swallows padded ids, so that no branch is needed.
        self._row = np.arange(num_layers, dtype=np.int64)[:, None] * self._width
        self._routed = np.zeros(num_layers * self._width + 1, dtype=np.bool_)

    @classmethod
    def from_residents(
        cls, pools: SlotPools, resident_LE: BoolArray, *, num_spare: int = 0
    ) -> Placement:
        """Gives every marked expert a slot, layer by layer in ascending id, besides those that
        have no other place.

        Raises:
            CapacityError: more experts than slots.
        """
        placement = cls(pools, num_spare=num_spare)
        width = resident_LE.shape[1]
        for layer, expert in np.argwhere(resident_LE & ~placement.pinned[:, :width]):
            placement.assign(int(layer), int(expert))
        return placement

    @property
    def num_layers(self) -> int:
        return len(self.slot_of)

    def owner(self, slot: int) -> tuple[int, int] | None:
        """Layer and expert of a slot, `None` for a free one."""
        index = int(self._owner[slot])
        return None if index < 0 else divmod(index, self._width)

    def residents(self, layer: int) -> IntArray:
        """Experts of a layer that have a slot, ascending, [C] int64."""
        return np.flatnonzero(self.resident[layer, : self.num_experts[layer]])

    def num_free(self, layer: int) -> int:
        """Slots without an owner that this layer could take."""
        return len(self._free[self.pools.pool_of_layer[layer]])

    def assign(self, layer: int, expert: int) -> int:
        """Gives a free slot to an expert that has none, and returns it.

        Raises:
            CapacityError: the layer's pool has no free slot.
        """
        assert not self.resident[layer, expert], f"expert {expert} of layer {layer} has a slot"
        pool = self.pools.pool_of_layer[layer]
        if not self._free[pool]:
            raise CapacityError(
                f"no free slot for expert {expert} of layer {layer}: all "
                f"{self.pools.pools[pool].num_slots} of its size are taken",
                hint="evict an expert first, or raise the VRAM budget",
            )
        slot = self._free[pool].pop()
        self._set(layer, expert, slot)
        return slot

    def lend(self, layer: int) -> tuple[int, int]:
        """Offers a free slot to a layer through a spare column; returns (column, slot)."""
        first = self.pools.max_experts
        empty = np.flatnonzero(~self.resident[layer, first:])
        assert len(empty), f"layer {layer} has no spare column left of {self.num_spare}"
        column = first + int(empty[0])
        return column, self.assign(layer, column)

    def evict(self, layer: int, expert: int) -> int:
        """Takes the slot from an expert (or a spare column) and returns it, now free."""
        slot = int(self.slot_of[layer, expert])
        assert slot >= 0, f"expert {expert} of layer {layer} has no slot"
        assert not self.pinned[layer, expert], f"expert {expert} of layer {layer} has no host copy"
        self.slot_of[layer, expert] = -1
        self.resident[layer, expert] = False
        self._owner[slot] = -1
        self._free[self.pools.pool_of_layer[layer]].append(slot)
        return slot

    def pin(self, layer: int, expert: int) -> None:
        """Marks a resident expert as one without a host copy: it is never evicted."""
        assert self.resident[layer, expert], f"expert {expert} of layer {layer} has no slot"
        self.pinned[layer, expert] = True

    def match(
        self, layer: int, ids: Iterable[int], victims: IntArray, admit: IntArray
    ) -> list[tuple[int, int, int]]:
        """The match rule for one layer: what takes whose slot. Changes nothing.

        A victim is free if it is still resident, not pinned and not itself routed; the j-th missing
        expert with `admit > 0`, in ascending id, gets the j-th free victim if it outranks it, that
        is if its `admit` is above the victim's position in `victims`.

        Args:
            ids: routed ids in any order; repeated ones count once, those outside 0..E-1 not at all.
            victims: [V], residents worst first, each once, -1 for none.
            admit: [E], how many leading victims each expert outranks.

        Returns:
            (expert, victim, slot) in ascending expert.
        """
        ids_LN = np.full((self.num_layers, max(1, len(ids := list(ids)))), -1, dtype=np.int64)
        ids_LN[layer, : len(ids)] = ids
        victims_LV = np.full((self.num_layers, len(victims)), -1, dtype=np.int64)
        victims_LV[layer] = victims
        admit_LE = np.zeros((self.num_layers, self.pools.max_experts), dtype=np.int64)
        admit_LE[layer, : len(admit)] = admit
        found = self.match_step(ids_LN, victims_LV, admit_LE)
        columns = (found.expert, found.victim, found.slot)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def match_step(self, ids_LN: IntArray, victims_LV: IntArray, admit_LE: IntArray) -> Matches:
        """The match rule of `match` for all layers of a step at once. Changes nothing.

        Args:
            ids_LN: routed ids; a layer with fewer is padded with -1.
            victims_LV, admit_LE: the wishes that were in force in that step.
        """
        ids = np.sort(ids_LN, axis=1)
        # As unsigned numbers, negative ids are beyond every layer.
        valid = ids.view(_UNSIGNED[ids.itemsize]) < self._num_experts_L1
        valid[:, 1:] &= ids[:, 1:] != ids[:, :-1]
        cell_LN = np.where(valid, ids + self._row, self._routed.size - 1)
        hit = self._resident.take(cell_LN)
        missing = np.greater(valid, hit)
        missing &= self._admitted(ids, cell_LN, admit_LE)
        layer, column = missing.nonzero()

        cell_LV = victims_LV + self._row  # one before the row for no victim, any cell will do
        self._routed[cell_LN] = True
        free = self._resident.take(cell_LV)
        np.greater(free, self._routed.take(cell_LV), out=free)
        np.greater(free, self.pinned.take(cell_LV), out=free)
        free &= victims_LV >= 0
        self._routed[cell_LN] = False

        # Positions of the free victims in order, then numbers that no `admit` is above.
        num_victims = victims_LV.shape[1]
        positions = np.full((self.num_layers, num_victims + 1), _NO_POSITION)
        np.copyto(positions[:, :-1], _POSITIONS[:num_victims], where=free)
        positions.sort(axis=1)

        rank = missing.cumsum(axis=1)[layer, column] - 1
        position = positions[layer, np.minimum(rank, num_victims)]
        expert = ids[layer, column]
        outranks = admit_LE[layer, expert] > position
        layer, expert, position = layer[outranks], expert[outranks], position[outranks]
        victim = victims_LV[layer, position].astype(np.int64)
        return Matches(
            layer=layer,
            expert=expert,
            victim=victim,
            slot=self.slot_of[layer, victim].astype(np.int64),
            routed_LN=valid,
            hit_LN=hit,
        )

    def apply(self, matches: Matches) -> None:
        """Carries out what `match_step` found: each expert takes its victim's slot."""
        layer, expert, victim, slot = matches.layer, matches.expert, matches.victim, matches.slot
        self.slot_of[layer, victim] = -1
        self.resident[layer, victim] = False
        self.slot_of[layer, expert] = slot
        self.resident[layer, expert] = True
        self._owner[slot] = layer * self._width + expert

    def check(self) -> None:
        """Asserts the invariants: owners and `slot_of` agree, pools are kept, no slot is lost."""
        assert np.array_equal(self.resident, self.slot_of >= 0)
        assert not (self.pinned & ~self.resident).any()
        owned = np.flatnonzero(self._owner >= 0)
        layer, column = np.divmod(self._owner[owned], self._width)
        assert np.array_equal(self.slot_of[layer, column], owned)
        assert len(owned) == np.count_nonzero(self.resident)
        padding = np.arange(self.pools.max_experts) >= self.num_experts[:, None]
        assert not self.resident[:, : self.pools.max_experts][padding].any()
        for index, (pool, free) in enumerate(zip(self.pools.pools, self._free, strict=True)):
            inside = (owned >= pool.first_slot) & (owned < pool.first_slot + pool.num_slots)
            assert {self.pools.pool_of_layer[i] for i in layer[inside]} <= {index}
            assert sorted([*owned[inside], *free]) == list(
                range(pool.first_slot, pool.first_slot + pool.num_slots)
            )

    def _admitted(self, ids_LN: IntArray, cell_LN: IntArray, admit_LE: IntArray) -> BoolArray:
        """Whether each routed expert outranks anyone; what is no expert's says anything."""
        width = admit_LE.shape[1]
        if width != self._width:  # without the spare columns
            cell_LN = ids_LN + self._row // self._width * width
        admitted: BoolArray = admit_LE.take(cell_LN, mode="clip") > 0
        return admitted

    def _set(self, layer: int, expert: int, slot: int) -> None:
        self.slot_of[layer, expert] = slot
        self.resident[layer, expert] = True
        self._owner[slot] = layer * self._width + expert
