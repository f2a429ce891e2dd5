"""Which policy moves slots, and who owns them before anything was routed.

Knows names, counts and a profile; nothing of plans, devices or models.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

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
    get owners, which then keep them.
    """
    if isinstance(policy, NoPolicy):
        return policy.best_experts(slots_L)
    return policy.initial(pools, slots_per_layer=slots_L)
