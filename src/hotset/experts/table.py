"""The address table: one int64 per (layer, expert), the only thing a kernel asks about placement.

`address[l, e]` is where the record of expert e of layer l is read *now*: a slot, or its place in
the host arena. `host_address` is constant. Kernels take a row of it and do not care which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hotset.core.geometry import MoELayer


class AddressTable:
    """Device tables of shape [L, E_max] int64; 0 where a layer has fewer than E_max experts.

    Args:
        layers: the MoE layers.
        host_address: (layer, expert) -> address in the arena as the device sees it.
        device: where the tables lie.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        host_address: Callable[[int, int], int],
        *,
        device: torch.device,
    ) -> None:
        width = max(layer.num_experts for layer in layers)
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

    def retarget(self, addresses: dict[tuple[int, int], int | None]) -> None:
        """Points experts elsewhere: (layer, expert) -> address, `None` for its host copy.

        One copy of the whole table (a few hundred KiB at most), ordered on the current stream
        behind the kernels that still read the old addresses.
        """
        for (layer, expert), address in addresses.items():
            self._mirror[layer, expert] = self._host[layer, expert] if address is None else address
        self.address.copy_(self._mirror)
