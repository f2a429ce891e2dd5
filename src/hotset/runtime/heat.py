"""Uses of each expert since the start, and how many of them found no slot: a hot set as a picture.

A watcher of steps. Knows routed ids and who owns the slots; nothing of tokens or bytes.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from hotset.core.placement import Placement
from hotset.core.slot_pools import BoolArray, IntArray
from hotset.runtime.steps import Owners


class Heat:
    """Counts of one engine; add it to the watchers of its `Steps`.

    Args:
        placement: who owns the slots; brought up to date before a watcher is told of a step.

    Attributes:
        use_LE: [L, E] int64, how often each expert was routed to, once for each token.
        missed_LE: those of them that came in a step which began without a slot for it.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._num_experts = int(placement.num_experts.max())
        shape = (placement.num_layers, self._num_experts)
        self.use_LE = np.zeros(shape, dtype=np.int64)
        self.missed_LE = np.zeros(shape, dtype=np.int64)
        self._resident_LE = self.residents()

    def residents(self) -> BoolArray:
        """[L, E] bool, who has a slot now; a copy."""
        return self._placement.resident[:, : self._num_experts].copy()

    def step(self, ids_LN: IntArray, owners: Owners) -> None:
        """See `Watcher`."""
        num_layers, num_experts = self.use_LE.shape
        known_LN = (ids_LN >= 0) & (ids_LN < num_experts)
        cells_LN = np.arange(num_layers)[:, None] * num_experts + ids_LN
        counts = np.bincount(cells_LN[known_LN], minlength=self.use_LE.size)
        counts_LE = counts.reshape(self.use_LE.shape)
        self.use_LE += counts_LE
        self.missed_LE += np.where(self._resident_LE, 0, counts_LE)
        self._resident_LE = self.residents()

    def end(self, owner: Hashable) -> None:
        """See `Watcher`."""
