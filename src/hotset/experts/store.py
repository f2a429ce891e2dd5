"""The expert store: arena, slots, table and ring of one engine, and the moves between them.

Keeps three things in step: who owns a slot (the placement), what bytes lie in it, and where the
table points. Why an expert should have a slot is the policy's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from hotset.core.geometry import MoELayer
from hotset.core.placement import Placement
from hotset.core.slot_pools import SlotPools
from hotset.experts.arena import HostArena
from hotset.experts.ring import Fill, Ring
from hotset.experts.slots import SlotMemory
from hotset.experts.table import AddressTable


class ExpertStore:
    """Records of all experts of a model, in host memory and in slots.

    Args:
        layers: the MoE layers.
        pools: the slots.
        device: where slots, staging buffers and the table lie.
        staging_records: room of the prefill ring, in the largest records.
        poison: fill free slots with NaN.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        pools: SlotPools,
        *,
        device: torch.device,
        staging_records: int,
        poison: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self.device = device
        self.arena = HostArena(self.layers, pinned=device.type == "cuda")
        self.slots = SlotMemory(pools, device=device, poison=poison)
        self.table = AddressTable(self.layers, self.arena.address, device=device)
        self.ring = Ring(
            self.arena,
            device=device,
            num_records=staging_records,
            record_bytes=max(layer.expert.record_bytes for layer in self.layers),
        )
        self.placement = Placement(pools)

    def fields(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        """Typed, shaped, writable views of one record in the arena, by field name."""
        record = self.arena.record(layer, expert)
        return {
            field.name: record[field.offset : field.offset + field.nbytes]
            .view(getattr(torch, field.dtype))
            .view(field.shape)
            for field in self.layers[layer].expert.layout.fields
        }

    def place(self, placement: Placement) -> None:
        """Makes `placement` the owner of the slots: evicts, copies, retargets.

        Everything is ordered on the current stream behind the kernels already queued there, so it
        may be called between steps without waiting. An expert that keeps its slot is not copied.
        """
        before, after = _owned(self.placement), _owned(placement)
        lost = {key: slot for key, slot in before.items() if after.get(key) != slot}
        won = {key: slot for key, slot in after.items() if before.get(key) != slot}
        if lost:
            self.table.retarget(dict.fromkeys(lost))
            for slot in lost.values():
                self.slots.release(slot)
        if won:
            self.ring.fill([Fill(*key, slot) for key, slot in won.items()], self.slots)
            self.table.retarget({key: self.slots.address(slot) for key, slot in won.items()})
        self.placement = placement

    def audit(self) -> list[str]:
        """Compares every owned slot byte for byte with the arena, and the table with both.

        Returns:
            One sentence per difference; none when all is right.
        """
        wrong = []
        table = self.table.address.cpu()
        owned = _owned(self.placement)
        for (layer, expert), slot in owned.items():
            if not torch.equal(self.slots.view(slot).cpu(), self.arena.record(layer, expert)):
                wrong.append(f"slot {slot} differs from layer {layer} expert {expert}")
        for index, spec in enumerate(self.layers):
            for expert in range(spec.num_experts):
                owner = owned.get((index, expert))
                want = (
                    self.arena.address(index, expert)
                    if owner is None
                    else self.slots.address(owner)
                )
                if int(table[index, expert]) != want:
                    wrong.append(f"layer {index} expert {expert} has a wrong address")
        return wrong

    def close(self) -> None:
        """Gives the page-locked memory back. Safe to call twice."""
        self.arena.close()

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _owned(placement: Placement) -> dict[tuple[int, int], int]:
    """(layer, expert) -> slot of every resident expert."""
    return {
        (layer, int(expert)): int(placement.slot_of[layer, expert])
        for layer in range(placement.num_layers)
        for expert in placement.residents(layer)
    }
