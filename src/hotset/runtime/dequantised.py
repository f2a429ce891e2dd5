"""Quantised experts on their way through a prompt's layer: a few at a time as plain records.

    for a few experts: dequantise each that has tokens, once; then every block multiplies with them

Works on addresses and ranges of expert ids. Where a record lies, and how many are dequantised at a
time, cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import add

import torch

from hotset.core.geometry import MoELayer
from hotset.core.staging import dequantised_records
from hotset.kernels.dispatch import Kernels
from hotset.runtime.block_sums import ManyTokens


class DequantisedExperts:
    """Room for some plain records of a layer, and what runs over them.

    Args:
        kernels: that write them.
        layer: MoE layer of the experts.
        sums: blocks made for plain records.
        device: of records and blocks.
    """

    def __init__(
        self, kernels: Kernels, layer: MoELayer, sums: Sequence[ManyTokens], device: torch.device
    ) -> None:
        self._kernels, self._spec, self._sums = kernels, layer.expert, sums
        size = dequantised_records(layer.expert, layer.num_experts)
        plain_bytes = layer.expert.as_plain().record_bytes
        self._plain_ND = torch.empty(size, plain_bytes, dtype=torch.uint8, device=device)
        places = layer.num_experts, size, plain_bytes
        self._round = _round(self._plain_ND.data_ptr(), *places, device=device)
        # What has no tokens is not read: it may lie behind the link.
        self._counts_E = reduce(add, (one.counts for one in sums))

    def add(self, address_E: torch.Tensor, *, first: int, stop: int) -> None:
        """Runs the experts `first` .. `stop` - 1 on their tokens of every block.

        Args:
            address_E: where each quantised record is read; 0 for experts outside the range.
        """
        size, num_experts = len(self._plain_ND), len(address_E)
        behind = size - first % size
        plain_E = self._round[behind : behind + num_experts]
        for start in range(first, stop, size):
            end = min(start + size, stop)
            # Written over behind the products that read it: both are on the current stream.
            self._kernels.dequantise_records(
                address_E[start:end],
                self._spec,
                self._plain_ND[: end - start],
                counts_N=self._counts_E[start:end],
            )
            for one in self._sums:
                one.add(plain_E, first=start, stop=end)


@lru_cache(maxsize=64)  # an allocator gives the same memory again and again
def _round(
    base: int, num_experts: int, size: int, plain_bytes: int, *, device: torch.device
) -> torch.Tensor:
    """Addresses of `size` plain records in turn, [num_experts + size] int64: as places go round, an
    expert's is known from the first expert of its range."""
    # Made on the device: an upload would wait for the records that are on their way.
    turns = torch.arange(num_experts + size, dtype=torch.int64, device=device) % size
    return turns * plain_bytes + base
