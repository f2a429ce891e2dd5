"""Policies that never move an expert: the two static hot sets, and no hot set at all.

They know a profile at most, and forget everything they are shown.
"""

from __future__ import annotations

import numpy as np

from hotset.core.placement import Placement
from hotset.core.policy.base import FloatArray, Policy, Wishes
from hotset.core.slot_pools import BoolArray, IntArray, SlotPools


class FixedPolicy(Policy):
    """Base of the policies that wish for nothing."""

    moves = False

    def observe(self, ids_LN: IntArray) -> None:
        pass

    def read(self, layer: int, ids_TK: IntArray) -> None:
        pass

    def scores(self, layer: int) -> FloatArray:
        scores = np.zeros(self.shape) if self.prior_LE is None else self.prior_LE
        return scores[layer, : self.num_experts[layer]]

    def wishes(self, placement: Placement, *, out: Wishes | None = None) -> Wishes:
        wishes = self._buffers(out)
        wishes.victims_LV[:] = -1
        wishes.admit_LE[:] = 0
        return wishes


class NoPolicy(FixedPolicy):
    """No hot set: every record is read where it lies."""

    name = "none"

    def initial(self, pools: SlotPools, *, slots_per_layer: IntArray | None = None) -> BoolArray:
        return np.zeros(self.shape, dtype=np.bool_)


class StaticUniform(FixedPolicy):
    """The most used experts of a profile, the same number in each layer."""

    name = "static-uniform"
    needs_prior = True

    def initial(self, pools: SlotPools, *, slots_per_layer: IntArray | None = None) -> BoolArray:
        self.check_ready()
        return super().initial(pools, slots_per_layer=slots_per_layer)


class StaticGlobal(FixedPolicy):
    """The most used experts of a profile over all layers of a pool.

    Layers with more skew get more slots. `slots_per_layer` counts only in its sum over the pool.
    """

    name = "static-global"
    needs_prior = True

    def initial(self, pools: SlotPools, *, slots_per_layer: IntArray | None = None) -> BoolArray:
        self.check_ready()
        assert self.prior_LE is not None
        beyond = np.arange(self.shape[1]) >= self.num_experts[:, None]
        rank = np.where(beyond, -np.inf, self.prior_LE)
        marked = np.zeros(self.shape, dtype=np.bool_)
        for index, pool in enumerate(pools.pools):
            layers = np.asarray(pools.layers_of(index))
            slots = pool.num_slots if slots_per_layer is None else slots_per_layer[layers].sum()
            best = np.argsort(-rank[layers], axis=None, kind="stable")
            best = best[: min(int(slots), int(self.num_experts[layers].sum()))]
            row, expert = np.divmod(best, self.shape[1])
            marked[layers[row], expert] = True
        return marked
