"""What the decode steps of an engine would have taken at the speed of light, summed.

A watcher of steps: from what each routed, who had a slot, and how much the caches held, by the
formula of `core.costmodel`. Knows rates and ids; not how long a step really took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np

from hotset.core.costmodel import Rates, decode_step
from hotset.core.geometry import ModelGeometry
from hotset.core.placement import Placement
from hotset.core.slot_pools import BoolArray, IntArray
from hotset.runtime.steps import Owners


class StepLight:
    """Counts of one engine; add it to the watchers of its `Steps`.

    Args:
        geometry: of the model.
        rates: of the machine.
        placement: who owns the slots; brought up to date before a watcher is told of a step.

    Attributes:
        seconds: of the decode steps so far. What a sequence shares of an earlier one's cache is
            not in it, so that it is too short by the time to read that.
    """

    def __init__(self, geometry: ModelGeometry, rates: Rates, placement: Placement) -> None:
        self._geometry, self._rates, self._placement = geometry, rates, placement
        self._num_experts = int(placement.num_experts.max())
        self._rows_L1 = np.arange(placement.num_layers)[:, None]
        self._lengths: Counter[Hashable] = Counter()
        self._resident_LE = self._residents()
        self.seconds = 0.0

    def step(self, ids_LN: IntArray, owners: Owners) -> None:
        """See `Watcher`. Steps with more than a token of a sequence are its prompt."""
        for owner, num_tokens in owners:
            if owner is not None:
                self._lengths[owner] += num_tokens
        if owners and all(num_tokens == 1 for _, num_tokens in owners):
            self.seconds += self._step_ms(ids_LN, owners) / 1e3
        self._resident_LE = self._residents()

    def end(self, owner: Hashable) -> None:
        """See `Watcher`."""
        self._lengths.pop(owner, None)

    def _step_ms(self, ids_LN: IntArray, owners: Owners) -> float:
        used_LE = np.zeros_like(self._resident_LE)
        used_LE[self._rows_L1, np.where(ids_LN < 0, self._num_experts, ids_LN)] = True
        used_LE[:, self._num_experts] = False  # where padding ended
        hits_L = np.count_nonzero(used_LE & self._resident_LE, axis=1)
        misses_L = np.count_nonzero(used_LE, axis=1) - hits_L
        return decode_step(
            self._geometry,
            self._rates,
            hits=hits_L.tolist(),
            misses=misses_L.tolist(),
            context_tokens=sum(self._lengths[owner] for owner, _ in owners if owner is not None),
        ).total_ms

    def _residents(self) -> BoolArray:
        """[L, E + 1], who has a slot now; the last column is nobody's."""
        resident_LE = np.zeros((self._placement.num_layers, self._num_experts + 1), dtype=np.bool_)
        resident_LE[:, :-1] = self._placement.resident[:, : self._num_experts]
        return resident_LE
