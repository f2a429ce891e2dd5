"""The expert store: arena, slots, table and ring of one engine, and the moves between them.

Keeps three things in step: who owns a slot (the placement), what bytes lie in it, and where the
table points. Why an expert should have a slot is the policy's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from hotset.core.closing import Closing
from hotset.core.geometry import MoELayer
from hotset.core.placement import Matches, Placement
from hotset.core.record import RecordLayout
from hotset.core.slot_pools import SlotPools
from hotset.experts.arena import HostArena
from hotset.experts.ring import Fill, Ring, Staged
from hotset.experts.slots import SlotMemory
from hotset.experts.table import AddressTable


class ExpertStore(Closing):
    """Records of all experts of a model, in host memory and in slots.

    Args:
        layers: the MoE layers.
        pools: the slots.
        device: where slots, staging buffers and the table lie.
        staging_records: room of the prefill ring, in the largest records.
        num_buffers: of the ring.
        poison: fill free slots with NaN.
        num_spare: spare columns of placement and table, to lend free slots to layers.
        banks: see `HostArena`.

    Attributes:
        steps_in_flight: steps that may fill slots and of which `adopt` was not told yet. Until it
            is 0 the device knows more than the placement, and nothing else may be placed.
        num_homes: records of each layer that lie in the arena: of its first experts by id.
        is_torn: a slot holds what `tee` has copied there, and the table calls it something else.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        pools: SlotPools,
        *,
        device: torch.device,
        staging_records: int,
        num_buffers: int = 2,
        poison: bool = False,
        num_spare: int = 0,
        banks: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.device = device
        self.placement = Placement(pools, num_spare=num_spare)
        slot_only = pools.num_slot_only or (0,) * len(self.layers)
        homes = [
            replace(layer, num_experts=layer.num_experts - count)
            for layer, count in zip(self.layers, slot_only, strict=True)
        ]
        self.num_homes = [layer.num_experts for layer in homes]
        self.arena = HostArena(
            homes,
            pinned=device.type == "cuda",
            banks=banks,
        )
        self.slots = SlotMemory(pools, device=device, poison=poison)
        self.table = AddressTable(self.layers, self._home, device=device, num_spare=num_spare)
        owned = _owned(self.placement)
        self.table.retarget({key: self.slots.address(slot) for key, slot in owned.items()})
        self.ring = Ring(
            self.arena,
            device=device,
            num_records=staging_records,
            record_bytes=max(layer.expert.record_bytes for layer in self.layers),
            num_buffers=num_buffers,
        )
        self.steps_in_flight, self.is_torn = 0, False
        self._fields = [_places(layer.expert.layout) for layer in self.layers]
        self._dtypes = [{place[1] for place in fields} for fields in self._fields]

    def _home(self, layer: int, expert: int) -> int:
        """Where the device finds a record without a slot; 0 where that cannot be, so that the
        device, which takes who is at home for missing, never misses it."""
        return self.arena.address(layer, expert) if expert < self.num_homes[layer] else 0

    def record(self, layer: int, expert: int) -> torch.Tensor:
        """uint8 view of what an expert's record is loaded into: in the arena, or on the device in
        the slot of one that has no host copy."""
        if expert < self.num_homes[layer]:
            return self.arena.record(layer, expert)
        return self.slots.view(int(self.placement.slot_of[layer, expert]))

    def fields(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        """Typed, shaped, writable views of `record`, by field name."""
        record = self.record(layer, expert)
        typed = {dtype: record.view(dtype) for dtype in self._dtypes[layer]}
        # One operation for each: this is asked of every expert while a model loads.
        return {
            name: typed[dtype].as_strided(shape, strides, typed[dtype].storage_offset() + first)
            for name, dtype, shape, strides, first in self._fields[layer]
        }

    def place(self, placement: Placement) -> None:
        """Makes `placement` the owner of the slots: evicts, copies, retargets.

        Everything is ordered on the current stream behind the kernels already queued there, so it
        may be called between steps without waiting. An expert that keeps its slot is not copied.
        """
        assert placement.num_spare == self.placement.num_spare and self.steps_in_flight == 0
        before, after = _owned(self.placement), _owned(placement)
        lost = {key: slot for key, slot in before.items() if after.get(key) != slot}
        won = {key: slot for key, slot in after.items() if before.get(key) != slot}
        if lost:
            self.table.retarget(dict.fromkeys(lost))
            for slot in lost.values():
                self.slots.release(slot)
        if won:
            self.ring.fill(self._fills(won), self.slots)
            self.table.retarget({key: self.slots.address(slot) for key, slot in won.items()})
        self.placement = placement

    def lend(self, layer: int) -> int:
        """Offers a free slot to a layer, whose next missing experts then need no victim for it.

        Ordered on the current stream, between steps.

        Returns:
            The spare column that stands for the slot until it is filled.
        """
        assert self.steps_in_flight == 0
        column, slot = self.placement.lend(layer)
        self.table.retarget({(layer, column): self.slots.address(slot)})
        return column

    def adopt(self, matches: Matches) -> None:
        """Takes note of fills that the device has carried out itself: no byte and no address moves.

        Must be told of every step that matched, in order, before anything else is placed; `audit`
        finds out if it was not.
        """
        assert self.steps_in_flight > 0
        self.table.adopt(matches, self.slots.addresses(matches.slot))
        self.placement.apply(matches)
        self.steps_in_flight -= 1

    def tee(self, staged: Staged, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies staged records into the slots of other experts of their layer, beside what is
        computed meanwhile. `hand_over` makes them the owners; until then nothing may read the
        victims.

        Args:
            staged: where the records are; `Ring.computed`, behind all that reads the victims.
            pairs: (expert, victim), no victim twice.
        """
        if not pairs:
            return
        experts, victims = zip(*pairs, strict=True)
        where = self.placement.slot_of[staged.layer, list(victims)].tolist()
        # First: some may be copied when this is interrupted.
        self.is_torn = True
        self.ring.copy_to_slots(staged, experts, self.slots, where)

    def hand_over(self, layer: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Gives the slots of victims to experts whose records `tee` has copied there.

        Ordered on the current stream, behind the kernels that read the layer's addresses.

        Args:
            pairs: (expert, victim).
        """
        if not pairs:
            return
        assert self.steps_in_flight == 0
        expert, victim = np.array(pairs, dtype=np.int64).T
        matches = Matches(
            layer=np.full(len(expert), layer, dtype=np.int64),
            expert=expert,
            victim=victim,
            slot=self.placement.slot_of[layer, victim].astype(np.int64),
            routed_LN=np.zeros((0, 0), dtype=np.bool_),
            hit_LN=np.zeros((0, 0), dtype=np.bool_),
        )
        self.ring.wait_for_slots()
        self.table.adopt(matches, self.slots.addresses(matches.slot))
        self.table.send(layer)
        self.placement.apply(matches)
        self.is_torn = False

    def restore(self) -> None:
        """Makes slots and table what the placement says, after a step that broke off halfway.

        Such a step may have written parts of slots that the table calls something else, and the
        host may have been stopped between its notes: of owners the placement's alone count. Copies
        every owned slot again, ordered on the current stream.
        """
        pinned = self.placement.pinned
        owned = _owned(self.placement)
        again = {key: slot for key, slot in owned.items() if not pinned[key]}
        self.ring.wait_for_slots()
        self.ring.fill(self._fills(again), self.slots)
        self.table.restore({key: self.slots.address(slot) for key, slot in owned.items()})
        self.steps_in_flight, self.is_torn = 0, False

    def audit(self) -> list[str]:
        """Compares every owned slot byte for byte with the arena, and the table with both.

        Bytes between fields are nobody's: a copy brings them along, a fill does not.

        Returns:
            One sentence per difference; none when all is right.
        """
        wrong = []
        table = self.table.address.cpu()
        owned = _owned(self.placement)
        for fill in self._fills(owned):
            if fill.expert >= self.num_homes[fill.layer]:
                continue  # there is no other copy to compare it with
            record = self.arena.record(fill.layer, fill.expert)
            if not self._equal_fields(fill.layer, self.slots.view(fill.slot).cpu(), record):
                wrong.append(
                    f"slot {fill.slot} differs from layer {fill.layer} expert {fill.expert}"
                )
        for layer, spec in enumerate(self.layers):
            for column, found in enumerate(table[layer].tolist()):
                slot = owned.get((layer, column))
                home = self._home(layer, column) if column < spec.num_experts else 0
                if found != (home if slot is None else self.slots.address(slot)):
                    wrong.append(f"layer {layer} expert {column} has a wrong address")
        return wrong

    def _equal_fields(self, layer: int, record: torch.Tensor, other: torch.Tensor) -> bool:
        parts = [
            slice(field.offset, field.offset + field.nbytes)
            for field in self.layers[layer].expert.layout.fields
        ]
        return all(torch.equal(record[part], other[part]) for part in parts)

    def _fills(self, owned: dict[tuple[int, int], int]) -> list[Fill]:
        """What must lie in the slots of experts; spare columns stand for empty ones."""
        return [
            Fill(layer, column, slot)
            for (layer, column), slot in owned.items()
            if column < self.layers[layer].num_experts
        ]

    def close(self) -> None:
        """Gives the page-locked memory back. Safe to call twice."""
        self.arena.close()


def _places(
    layout: RecordLayout,
) -> list[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]]:
    """(name, dtype, shape, strides, first element counted in that dtype) of each field."""
    places = []
    for field in layout.fields:
        dtype: torch.dtype = getattr(torch, field.dtype)
        strides = torch.empty(field.shape, device="meta").stride()
        places.append((field.name, dtype, field.shape, strides, field.offset // dtype.itemsize))
    return places


def _owned(placement: Placement) -> dict[tuple[int, int], int]:
    """(layer, column) -> slot of every resident expert, and of every slot that is lent."""
    return {
        (int(layer), int(column)): int(placement.slot_of[layer, column])
        for layer, column in np.argwhere(placement.resident)
    }
