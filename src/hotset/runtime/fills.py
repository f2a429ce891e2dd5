"""The host's half of read-through fills: wishes before a step, the same matches again after it.

Owns the policy. Knows steps, wishes and routed ids; never looks at the device's table, for it
applies the device's rule to the same ids under the same wishes. Its work is for the time in which
the device runs: nothing waits for it, and wishes may be a step old, as the device checks what
they say against its own table.
"""

from __future__ import annotations

from collections import deque

import torch

from hotset.core.placement import Matches
from hotset.core.policy import Policy
from hotset.core.slot_pools import IntArray
from hotset.experts.store import ExpertStore
from hotset.experts.wishes import WishBuffers
from hotset.kernels.match_reference import LayerMatch


class FillPlanner:
    """Wishes, mirror and policy of one engine.

    For each step that matches (`MoERunner` does up to `MATCH_TOKENS` tokens): `begin_step`, queue
    the step, and `end_step` with its routed ids once they are known. `end_step` may come after the
    `begin_step` of the next one, so that its work runs beside that step; with more than two steps
    begun and not ended, wishes are renewed less often.

    Args:
        policy: who should own a slot; one that `moves`.
        store: told of every fill. Its placement is the mirror.

    Attributes:
        layers: for each MoE layer what its runner hands to the kernels, at fixed addresses.
    """

    def __init__(self, policy: Policy, store: ExpertStore) -> None:
        num_layers, num_experts = policy.shape
        assert policy.moves, f"policy `{policy.name}` never fills a slot"
        assert num_layers == len(store.layers)
        self._policy = policy
        self._store = store
        self._running: deque[int] = deque()
        self._buffers = WishBuffers(
            num_layers, policy.num_victims, num_experts, device=store.device
        )
        self.layers = self._make_layers()
        self._wish()

    def _make_layers(self) -> tuple[LayerMatch, ...]:
        buffers, table = self._buffers, self._store.table
        fill_LE = torch.zeros_like(buffers.admit_LE, dtype=torch.int64)
        evict_LV = torch.full_like(buffers.victims_LV, -1)
        return tuple(
            LayerMatch(
                address_W=table.address[index],
                host_address_W=table.host_address[index],
                victims_V=buffers.victims_LV[index],
                admit_E=buffers.admit_LE[index, : layer.num_experts],
                fill_E=fill_LE[index, : layer.num_experts],
                evict_V=evict_LV[index],
            )
            for index, layer in enumerate(self._store.layers)
        )

    def begin_step(self) -> None:
        """Sends the newest wishes: one copy on the current stream, before the step's kernels."""
        self._running.append(self._buffers.send())
        self._store.steps_in_flight += 1

    def end_step(self, ids_LN: IntArray) -> Matches:
        """Takes in what the oldest running step routed: mirror, policy and the next wishes follow.

        Args:
            ids_LN: routed ids of all its tokens. Order, repeats and padding outside 0..E-1 do not
                matter.

        Returns:
            What the device filled in that step, and what the step routed and hit.
        """
        wishes = self._buffers.sent(self._running.popleft())
        matches = self._store.placement.match_step(ids_LN, wishes.victims_LV, wishes.admit_LE)
        self._store.adopt(matches)
        self._policy.observe(ids_LN)
        self._wish()
        return matches

    def follow(self, policy: Policy) -> None:
        """Another policy wishes from now on; nothing may be running."""
        assert not self._running and policy.moves
        assert policy.num_victims == self._policy.num_victims
        self._policy = policy
        self._wish()

    def renew(self) -> None:
        """Wishes anew, after a prompt has told the policy what it routed (`runtime.tee`)."""
        self._wish()

    def abandon(self) -> None:
        """Forgets the running steps after one of them broke off, and mends slots and table.

        Which of its layers had been filled is not known, so every owned slot is copied again.
        """
        self._running.clear()
        self._store.restore()
        self._wish()

    def _wish(self) -> None:
        # Otherwise the set that would be overwritten is still to be replayed. The wishes then stay
        # as they are until the step before the last has ended.
        if all(number == self._buffers.number for number in self._running):
            self._policy.wishes(self._store.placement, out=self._buffers.stage())
