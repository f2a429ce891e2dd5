"""Which policy moves slots, and who owns them before anything was routed.

Knows names, counts and a profile; nothing of plans, devices or models.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from hotset.core.policy import HalfLife, NoPolicy, Policy, make_policy
from hotset.core.profile import Profile
from hotset.core.slot_pools import BoolArray, IntArray, SlotPools

logger = logging.getLogger(__name__)


def policy_for(
    num_experts: Sequence[int],
    *,
    num_slots: int,
    name: str | None = None,
    half_life: float | None = None,
    profile: Profile | None = None,
) -> Policy:
    """The policy of that name, or the one that fits the number of slots.

    With no slots, or one for every expert, none can change hands: auto is then `none`.

    Args:
        num_experts: of each MoE layer.
        num_slots: of all layers together.
        half_life: see `HalfLife`; `None` for the profile's, or else its default.
        profile: of this model, what static policies and `forecast` know.

    Raises:
        ConfigError: an unknown policy, or one that needs a profile.
    """
    movable = 0 < num_slots < sum(num_experts)
    chosen = name or (HalfLife.name if movable or half_life else NoPolicy.name)
    if half_life is None and chosen == HalfLife.name and profile is not None and profile.replay:
        half_life = profile.replay.half_life
    policy = make_policy(
        chosen,
        num_experts=num_experts,
        half_life=half_life,
        prior_LE=None if profile is None else profile.prior,
        forecast=None if profile is None else profile.forecast,
    )
    policy.check_ready()  # now, and not when the weights are loaded
    if name and policy.moves and not movable:
        reason = "there are no slots" if num_slots == 0 else "every expert has a slot"
        logger.warning("`--policy %s` has nothing to move: %s", name, reason)
    return policy


def initial_residents(policy: Policy, pools: SlotPools, slots_L: IntArray) -> BoolArray:
    """Experts that own a slot before anything was routed, [L, E].

    To the simulator `none` is the engine without slots. Here the plan has paid for them, so they
    get owners, which then keep them. Experts without a host copy have theirs beside these.
    """
    slot_only_L = np.array(pools.num_slot_only or (0,) * len(slots_L), dtype=np.int64)
    free_L = np.asarray(slots_L) - slot_only_L
    if isinstance(policy, NoPolicy):
        return _beside_slot_only(policy.best_experts(free_L), pools)
    return _beside_slot_only(policy.initial(pools, slots_per_layer=free_L), pools)


def _beside_slot_only(wanted_LE: BoolArray, pools: SlotPools) -> BoolArray:
    """Takes out those that have a slot anyway; each of them is replaced by the first expert of its
    layer that has none."""
    owned_LE = np.zeros_like(wanted_LE)
    for layer, expert in pools.slot_only:
        owned_LE[layer, expert] = True
    resident_LE = wanted_LE & ~owned_LE
    for layer, again in enumerate((wanted_LE & owned_LE).sum(axis=1)):
        others = ~(resident_LE | owned_LE)[layer, : pools.num_experts[layer]]
        resident_LE[layer, np.flatnonzero(others)[:again]] = True
    return resident_LE
