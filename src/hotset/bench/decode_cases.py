"""What `bench decode` compares: policies by name, and slots as a share or as a budget.

Knows how a share of slots and a budget of device memory follow from each other; measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotset.core.errors import CapacityError, ConfigError
from hotset.core.geometry import ModelGeometry
from hotset.core.placement import Placement
from hotset.core.plan import MemoryPlan
from hotset.core.policy import (
    POLICIES,
    FloatArray,
    ForecastPolicy,
    HalfLife,
    NoPolicy,
    Policy,
    StaticUniform,
    make_policy,
)
from hotset.core.slot_pools import SlotPools
from hotset.core.units import format_bytes, parse_bytes

# A random set that stays: hits by chance, as many as slots.
RANDOM = "random"
CHOICES = (*(name for name in POLICIES if name != ForecastPolicy.name), RANDOM)


@dataclass(frozen=True)
class PolicyChoice:
    """A policy of `core.policy`, or `random`.

    Attributes:
        half_life: steps, of policy `half-life`; `None` for its default.
    """

    policy: str
    half_life: float | None = None

    @classmethod
    def parse(cls, text: str) -> PolicyChoice:
        """Reads `lru`, or `half-life:64`.

        Raises:
            ConfigError: no such policy, or one that cannot be replayed, or a wrong half-life.
        """
        name, colon, number = text.partition(":")
        if name not in CHOICES:
            raise ConfigError(
                f"`--policies` has `{name}`, it knows {', '.join(CHOICES)}",
                hint="`forecast` is fitted to a model's own experts, which a replay only stands for"
                if name == ForecastPolicy.name
                else "write `half-life:16,half-life:64,static-uniform,lru`",
            )
        if not colon:
            return cls(name)
        if name == RANDOM:
            raise ConfigError(f"`--policies` has `{text}`, which has no half-life")
        try:
            choice = cls(name, float(number))
        except ValueError as error:
            raise ConfigError(f"`--policies` has `{text}`, which is no half-life") from error
        choice.make([1], np.ones((1, 1)))  # refuses what the policy refuses
        return choice

    @property
    def name(self) -> str:
        return self.policy if self.half_life is None else f"{self.policy} {self.half_life:g}"

    @property
    def moves(self) -> bool:
        return self.policy != RANDOM and POLICIES[self.policy].moves

    def make(self, num_experts: Sequence[int], prior_LE: FloatArray) -> Policy:
        """The policy. What a profile of other texts knows decides the first owners of slots, and
        those of static policies; the scores of `half-life` leave it out."""
        if self.policy == RANDOM:
            by_chance_LE = np.random.default_rng(0).random(prior_LE.shape)
            return make_policy(StaticUniform.name, num_experts=num_experts, prior_LE=by_chance_LE)
        return make_policy(
            self.policy,
            num_experts=num_experts,
            prior_LE=prior_LE,
            half_life=self.half_life,
            prior_weight=0.0 if self.policy == HalfLife.name else None,
        )


@dataclass(frozen=True)
class DecodeCase:
    """One measurement.

    Attributes:
        slots: share of the experts that have a slot, 0..1.
    """

    choice: PolicyChoice
    slots: float

    @property
    def words(self) -> str:
        if self.choice.policy == NoPolicy.name:
            return "no cache"
        return f"{percent(self.slots)} slots, {self.choice.name}"

    def placement(self, policy: Policy, pools: SlotPools) -> Placement:
        """The policy's first owners, with as many slots as the case has."""
        fewer = SlotPools.build(
            num_experts=pools.num_experts,
            record_bytes=[pools.pools[index].record_bytes for index in pools.pool_of_layer],
            num_slots={
                pool.record_bytes: int(self.slots * _experts_of(pools, index) + 1e-6)
                for index, pool in enumerate(pools.pools)
            },
        )
        return Placement.from_residents(pools, policy.initial(fewer))


NO_CACHE = DecodeCase(PolicyChoice(NoPolicy.name), 0.0)


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def make_cases(choices: Sequence[PolicyChoice], slots: Sequence[float]) -> list[DecodeCase]:
    """Every policy with every number of slots; without a cache there is nothing to repeat."""
    cases = [
        DecodeCase(choice, share)
        for choice in choices
        for share in slots
        if choice.policy != NoPolicy.name
    ]
    return list(dict.fromkeys(cases))


def parse_slots(text: str, plan: MemoryPlan, geometry: ModelGeometry) -> list[float]:
    """Reads shares such as `0.25`, and budgets such as `16GiB`: what everything together may take.

    Args:
        plan: with a slot for every expert.

    Raises:
        ConfigError: neither of them, or a share outside 0..1.
        CapacityError: a budget that has no room for what is no expert.
    """
    return [_share(part.strip(), plan, geometry) for part in text.split(",")]


def budget_bytes(share: float, plan: MemoryPlan, geometry: ModelGeometry) -> float:
    """Device memory with that share of the experts in slots: the plan without the other slots."""
    return _rest_bytes(plan) + share * geometry.expert_bytes


def _share(text: str, plan: MemoryPlan, geometry: ModelGeometry) -> float:
    try:
        share = float(text)
    except ValueError:
        budget, rest = parse_bytes(text, name="--slots"), _rest_bytes(plan)
        if budget < rest:
            raise CapacityError(
                f"`--slots {text}`: what is no slot takes {format_bytes(rest)}",
                hint="give more, or lower `--most-context` or `--batch`",
            ) from None
        return min(1.0, (budget - rest) / geometry.expert_bytes)
    if not 0 <= share <= 1:  # so that NaN fails too
        raise ConfigError(
            f"`--slots` has a share of {share:g}, it must be in 0..1",
            hint="a budget has a unit: `16GiB`",
        )
    return share


def _rest_bytes(plan: MemoryPlan) -> int:
    return plan.device.total_bytes - plan.device["slots"]


def _experts_of(pools: SlotPools, pool: int) -> int:
    return sum(pools.num_experts[layer] for layer in pools.layers_of(pool))
