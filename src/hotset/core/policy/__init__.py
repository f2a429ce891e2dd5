"""Policies by name: one interface, used by the runtime, the simulator and the tests."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from hotset.core.errors import ConfigError
from hotset.core.forecast import Forecast
from hotset.core.policy.adaptive import (
    DEFAULT_HALF_LIFE,
    DEFAULT_PRIOR_WEIGHT,
    MAX_EXPERTS,
    MIN_HALF_LIFE,
    HalfLife,
    Lru,
    ScoredPolicy,
)
from hotset.core.policy.base import MAX_VICTIMS, NUM_VICTIMS, FloatArray, Policy, Wishes
from hotset.core.policy.fixed import NoPolicy, StaticGlobal, StaticUniform
from hotset.core.policy.forecast import ForecastPolicy

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (HalfLife, ForecastPolicy, Lru, StaticUniform, StaticGlobal, NoPolicy)
}

__all__ = [
    "DEFAULT_HALF_LIFE",
    "DEFAULT_PRIOR_WEIGHT",
    "MAX_EXPERTS",
    "MAX_VICTIMS",
    "MIN_HALF_LIFE",
    "NUM_VICTIMS",
    "POLICIES",
    "FloatArray",
    "ForecastPolicy",
    "HalfLife",
    "Lru",
    "NoPolicy",
    "Policy",
    "ScoredPolicy",
    "StaticGlobal",
    "StaticUniform",
    "Wishes",
    "make_policy",
]


def make_policy(
    name: str,
    *,
    num_experts: Sequence[int],
    prior_LE: FloatArray | None = None,
    half_life: float | FloatArray | None = None,
    prior_weight: float | None = None,
    forecast: Forecast | None = None,
    num_victims: int = NUM_VICTIMS,
) -> Policy:
    """Builds a policy.

    Args:
        name: a key of `POLICIES`.
        num_experts: experts of each layer.
        prior_LE: [L, E], uses per step expected of each expert; the static policies need it.
        half_life, prior_weight: see `HalfLife`; `None` for its defaults.
        forecast: of a profile; policy `forecast` needs it, the others ignore it.
        num_victims: V.

    Raises:
        ConfigError: an unknown name, a parameter that this policy does not have, or one missing
            that it needs.
    """
    if name not in POLICIES:
        close = get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"one of {', '.join(POLICIES)}"
        raise ConfigError(f"unknown policy `{name}`", hint=hint)
    given = {"half_life": half_life, "prior_weight": prior_weight}
    own = {key: value for key, value in given.items() if value is not None}
    if name == HalfLife.name:
        return HalfLife(num_experts, prior_LE=prior_LE, num_victims=num_victims, **own)  # type: ignore[arg-type]
    if own:
        raise ConfigError(
            f"policy `{name}` has no `{next(iter(own))}`", hint=f"only `{HalfLife.name}` has it"
        )
    if name == ForecastPolicy.name:
        if forecast is None:
            raise ConfigError(
                f"policy `{name}` needs a profile with a forecast",
                hint=f"use `{HalfLife.name}`, which needs none",
            )
        return ForecastPolicy(
            num_experts, forecast=forecast, prior_LE=prior_LE, num_victims=num_victims
        )
    return POLICIES[name](num_experts, prior_LE=prior_LE, num_victims=num_victims)
