"""The match rule of one layer in plain Python: which missing expert takes which victim's slot.

Runs after the layer has routed and before its experts run. Knows addresses, wishes and routed ids;
why a victim is named and what lies at an address is not its business. `core.placement` applies the
same rule to slot numbers, so that the host derives later what the device did.

    missing   routed, read from the host now, with `admit` above 0; in ascending id
    free      victims in their order that have a slot now and are not routed in this step
    the j-th missing expert takes the slot of the j-th free victim if its `admit` is above the
    victim's place in the list; otherwise it is read in place

A victim is not routed and a taken slot was a victim's: no slot is read and written in one step.
Synchronises with the host freely.

Letters: E experts of the layer, W >= E columns of the address table, V victims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerMatch:
    """What the match rule of one layer reads and writes: contiguous tensors at fixed addresses.

    Attributes:
        address_W: int64, where each expert is read now. Columns from E on are spare: the address
            of an empty slot lent to the layer, 0 without one.
        host_address_W: int64, constant. 0 for an expert without a host copy, which is never a
            victim, and for spare columns, which may be.
        victims_V: int32, columns that may lose their slot, worst first, each once, -1 for none.
        admit_E: int32, how many leading victims an expert outranks.
        fill_E: int64, out: the slot that a missing expert takes, 0 for none.
        evict_V: int32, out: the victims that lose theirs, each in its place, -1 elsewhere.
    """

    address_W: torch.Tensor
    host_address_W: torch.Tensor
    victims_V: torch.Tensor
    admit_E: torch.Tensor
    fill_E: torch.Tensor
    evict_V: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.fill_E.numel()

    @property
    def num_victims(self) -> int:
        return self.victims_V.numel()

    def check(self) -> None:
        """Our own contract, on shapes and types only."""
        longs = (self.address_W, self.host_address_W, self.fill_E)
        ints = (self.victims_V, self.admit_E, self.evict_V)
        assert all(t.dtype == torch.int64 and t.ndim == 1 and t.is_contiguous() for t in longs)
        assert all(t.dtype == torch.int32 and t.ndim == 1 and t.is_contiguous() for t in ints)
        assert self.address_W.shape == self.host_address_W.shape
        assert (
            self.admit_E.shape == self.fill_E.shape and self.victims_V.shape == self.evict_V.shape
        )
        assert self.address_W.numel() >= self.num_experts


def match(ids: torch.Tensor, layer: LayerMatch) -> None:
    """Writes `fill_E` and `evict_V`; see `dispatch.Kernels.match`."""
    num_experts = layer.num_experts
    address, host = layer.address_W.tolist(), layer.host_address_W.tolist()
    admit = layer.admit_E.tolist()
    routed = {e for e in ids.flatten().tolist() if 0 <= e < num_experts}
    missing = [e for e in sorted(routed) if address[e] == host[e] != 0 and admit[e] > 0]

    def is_free(column: int) -> bool:
        if not 0 <= column < len(address) or column in routed:
            return False
        has_home = column >= num_experts or host[column] != 0
        return bool(has_home and address[column] != host[column])

    victims = enumerate(layer.victims_V.tolist())
    free = [(place, victim) for place, victim in victims if is_free(victim)]
    fill, evict = [0] * num_experts, [-1] * layer.num_victims
    for expert, (place, victim) in zip(missing, free, strict=False):
        if admit[expert] > place:
            fill[expert], evict[place] = address[victim], victim
    layer.fill_E.copy_(torch.tensor(fill, dtype=torch.int64))
    layer.evict_V.copy_(torch.tensor(evict, dtype=torch.int32))


def retarget(layer: LayerMatch) -> None:
    """Points filled experts to their slots and victims to the host; a spent spare column to 0."""
    evicted = layer.evict_V[layer.evict_V >= 0].long()
    layer.address_W[evicted] = layer.host_address_W[evicted]
    address_E = layer.address_W[: layer.num_experts]
    torch.where(layer.fill_E != 0, layer.fill_E, address_E, out=address_E)
