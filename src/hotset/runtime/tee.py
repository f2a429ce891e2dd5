"""Records that pass through the ring go into slots: which ones, and whose slots they take.

What a prompt routes feeds the policy's scores, token by token; of the records that its layer has
staged, those that now score above a resident take its slot, copied on the device at no link bytes.
A layer keeps as many residents as it had. Knows scores and ids; `experts/store` moves bytes.
"""

from __future__ import annotations

import numpy as np

from hotset.core.policy import Policy
from hotset.core.slot_pools import BoolArray, IntArray
from hotset.experts.ring import Staged
from hotset.experts.store import ExpertStore


class Tee:
    """What prompts do to slots.

    Args:
        policy: one that moves.
        store: whose slots.
    """

    def __init__(self, policy: Policy, store: ExpertStore) -> None:
        self._policy, self._store = policy, store

    def read(self, layer: int, ids_TK: IntArray) -> None:
        """Takes in what a prompt routes in a layer, its tokens in order."""
        self._policy.read(layer, ids_TK)

    def swaps(self, layer: int, used_E: BoolArray) -> Swaps:
        """What shall change hands in a layer while its records pass.

        None of it while decode steps that fill are in flight: they change owners on the device
        that the host does not know of yet.
        """
        if self._store.steps_in_flight:
            return Swaps(self._store, layer, used_E, [], [])
        num_experts = len(used_E)
        placement = self._store.placement
        resident_E = placement.resident[layer, :num_experts]
        score_E = self._policy.scores(layer)[:num_experts]
        wanted = np.flatnonzero(used_E & ~resident_E)
        given = np.flatnonzero(resident_E & ~placement.pinned[layer, :num_experts])
        wanted = wanted[np.argsort(-score_E[wanted], kind="stable")]
        given = given[np.argsort(score_E[given], kind="stable")]
        num = min(len(wanted), len(given))
        # Best against worst: as soon as one does not outrank its victim, none does.
        num = int(np.count_nonzero(score_E[wanted[:num]] > score_E[given[:num]]))
        return Swaps(self._store, layer, used_E, wanted[:num].tolist(), given[:num].tolist())


class Swaps:
    """The exchanges of one layer during one prompt.

    Args:
        store: whose slots.
        layer: MoE layer.
        used_E: experts that the prompt routes to.
        wanted: experts that shall get slots, best first.
        victims: experts that shall lose theirs, worst first.
    """

    def __init__(
        self,
        store: ExpertStore,
        layer: int,
        used_E: BoolArray,
        wanted: list[int],
        victims: list[int],
    ) -> None:
        self._store, self._layer, self._used_E = store, layer, used_E
        self._wanted, self._victims = wanted, victims
        self._taken: list[tuple[int, int]] = []

    def take(self, staged: Staged, *, stop: int) -> None:
        """Copies what is wanted of a staged group, whose kernels are queued, into slots at once.

        A victim that a later group still reads keeps its slot for now; an expert for which no
        other is left stays without one.

        Args:
            stop: experts below it have run.
        """
        here = [expert for expert in self._wanted if expert in staged.experts]
        done = [v for v in self._victims if v < stop or not self._used_E[v]]
        pairs = list(zip(here, done, strict=False))  # until either ends
        gone = {victim for _, victim in pairs}
        self._victims = [v for v in self._victims if v not in gone]
        self._store.tee(staged, pairs)
        self._taken += pairs

    def finish(self) -> None:
        """All groups have run: what was copied is where its expert is read from now on."""
        self._store.hand_over(self._layer, self._taken)
