"""The address table: one int64 per (layer, expert), the only thing a kernel asks about placement.

`address[l, e]` is where the record of expert e of layer l is read *now*: a slot, or its place in
the host arena. `host_address` is constant. Kernels take a row of it and do not care which it is.
The table also keeps on the host what the device's copy holds, so that nothing is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hotset.core.geometry import MoELayer
from hotset.core.placement import Matches
from hotset.core.slot_pools import IntArray
from hotset.experts.transfer import PLACE_BYTES, send, sent, uploads


class AddressTable:
    """Device tables [L, W = E_max + X] int64; 0 where a layer has fewer than E_max experts.

    Args:
        layers: the MoE layers.
        host_address: (layer, expert) -> address in the arena as the device sees it.
        device: where the tables lie.
        num_spare: X, spare columns of `core.placement`: addresses of empty slots lent to a layer.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        host_address: Callable[[int, int], int],
        *,
        device: torch.device,
        num_spare: int = 0,
    ) -> None:
        width = max(layer.num_experts for layer in layers) + num_spare
        self._mirror = torch.zeros((len(layers), width), dtype=torch.int64)
        for index, layer in enumerate(layers):
            for expert in range(layer.num_experts):
                self._mirror[index, expert] = host_address(index, expert)
        self.host_address = self._mirror.to(device, copy=True)
        self.address = self._mirror.to(device, copy=True)
        self._host = self._mirror.clone()
        self._num_experts = [layer.num_experts for layer in layers]

    def row(self, layer: int) -> torch.Tensor:
        """`address` of one layer, [E] int64 on the device; a view, so it is always current."""
        return self.address[layer, : self._num_experts[layer]]

    def choose(self, layer: int, staged_E: IntArray, *, first: int, stop: int) -> torch.Tensor:
        """Where the experts `first` .. `stop` - 1 of a layer are read, ordered on the current
        stream: [E] int64 on the device, 0 for the others.

        Args:
            staged_E: [E] int64, where that is not as the table says; 0 for those where it is.
        """
        row_E = self.row(layer)
        if row_E.is_cuda and staged_E.nbytes <= PLACE_BYTES:
            from hotset.kernels.upload import launch_choose

            out_E = torch.empty_like(row_E)
            with uploads(row_E.device).place(staged_E) as where:
                launch_choose(*where, row_E, out_E, first=first, stop=stop)
            return out_E
        out_E = torch.zeros_like(row_E)
        some = slice(first, stop)
        staged_R = sent(staged_E[some], row_E.device)
        torch.where(staged_R == 0, row_E[some], staged_R, out=out_E[some])
        return out_E

    def adopt(self, matches: Matches, slot_addresses: IntArray) -> None:
        """Takes note of what the device did to its own table; copies nothing.

        Args:
            matches: the fills of a step.
            slot_addresses: [M], the address of the slot of each.
        """
        mirror, layer = self._mirror.numpy(), matches.layer
        mirror[layer, matches.victim] = self._host.numpy()[layer, matches.victim]
        mirror[layer, matches.expert] = slot_addresses

    def send(self, layer: int) -> None:
        """Copies the host's idea of a layer's row to the device, ordered on the current stream."""
        send(self._mirror[layer].numpy(), self.address[layer])

    def restore(self, addresses: Mapping[tuple[int, int], int]) -> None:
        """Makes the table anew, whatever host and device took it for.

        Args:
            addresses: (layer, column) -> address of each that has a slot; all others are at home.
        """
        self._mirror.copy_(self._host)
        self.retarget(addresses)

    def retarget(self, addresses: Mapping[tuple[int, int], int | None]) -> None:
        """Points columns elsewhere: (layer, column) -> address, `None` for the host copy (if any).

        One copy of the whole table (a few hundred KiB at most), ordered on the current stream
        behind the kernels that still read the old addresses.
        """
        for (layer, expert), address in addresses.items():
            self._mirror[layer, expert] = self._host[layer, expert] if address is None else address
        self.address.copy_(self._mirror)
