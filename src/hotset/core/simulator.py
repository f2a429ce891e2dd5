"""Replays a trace against policies and slot counts, with the runtime's own policies and match rule.

Knows hits; refuses to know time. Conditions of one policy are replayed side by side as if they
were more layers of one model, because work per step is vectorised over layers. State is kept from
sequence to sequence, as a server's is.

Letters: T tokens, L MoE layers, K top-k, E experts, C conditions side by side, Q sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hotset.core.belady import belady
from hotset.core.errors import ConfigError
from hotset.core.forecast import Forecast
from hotset.core.placement import Placement
from hotset.core.policy import (
    NUM_VICTIMS,
    POLICIES,
    FloatArray,
    ForecastPolicy,
    HalfLife,
    Policy,
    ScoredPolicy,
    StaticGlobal,
    StaticUniform,
    make_policy,
)
from hotset.core.policy.base import top_experts
from hotset.core.slot_pools import BoolArray, IntArray, SlotPools
from hotset.core.trace import Trace

HINDSIGHT = "hindsight-static"
BELADY = "belady"
OFFLINE = (HINDSIGHT, BELADY)
"""Bounds that look ahead: no policy of the runtime, only of the simulator."""

NEEDS_PROFILE = (StaticUniform.name, StaticGlobal.name, ForecastPolicy.name)


@dataclass(frozen=True)
class Condition:
    """What is replayed.

    Attributes:
        policy: a key of `POLICIES` or one of `OFFLINE`.
        slots: experts with a slot, as a fraction of each layer's.
        half_life: of policy `half-life`, steps.
        prior_weight: of policy `half-life`, see `HalfLife`.
    """

    policy: str
    slots: float
    half_life: float | None = None
    prior_weight: float = 0.0

    def __post_init__(self) -> None:
        known = (*POLICIES, *OFFLINE)
        if self.policy not in known:
            raise ConfigError(f"unknown policy `{self.policy}`", hint=f"one of {', '.join(known)}")
        if not 0 <= self.slots <= 1:
            raise ConfigError(
                f"`slots` is {self.slots:g}, it is a fraction of the experts, 0..1", option="slots"
            )
        if (self.half_life is not None) != (self.policy == HalfLife.name):
            raise ConfigError(f"`half_life` belongs to policy `{HalfLife.name}`, and only to it")

    @property
    def label(self) -> str:
        name = self.policy if self.half_life is None else f"{self.policy} {self.half_life:g}"
        return f"{name} prior {self.prior_weight:g}" if self.prior_weight else name

    def slots_per_layer(self, num_experts: Sequence[int]) -> IntArray:
        """[L]; a fraction above 0 gives at least one slot."""
        least = 1 if self.slots > 0 else 0
        return np.array([max(least, round(experts * self.slots)) for experts in num_experts])


@dataclass(frozen=True)
class Result:
    """Hits of one condition.

    Attributes:
        hits_Q, uses_Q: [Q] int64, per sequence, all layers together.
    """

    condition: Condition
    hits_Q: IntArray
    uses_Q: IntArray

    @property
    def hit_rate(self) -> float:
        return float(self.hits_Q.sum() / self.uses_Q.sum())


def replay(
    sequences: Iterable[IntArray],
    policy: Policy,
    placement: Placement,
    *,
    copies: int = 1,
    wish_lag: int = 0,
) -> IntArray:
    """Runs a policy over sequences, one token per step, exactly as the runtime does.

    Args:
        sequences: ids [T, L, K] each, -1 for padding.
        policy, placement: of C*L layers; both are changed.
        copies: C, how often the layers of the trace are repeated.
        wish_lag: how many steps old the wishes are that a step is matched with; the host learns
            the ids of a step while the next one runs, so the runtime's is 1 at most.

    Returns:
        [Q, C*L] int64 hits.
    """
    pending = [policy.wishes(placement) for _ in range(wish_lag + 1)]
    hits, step = [], 0
    for ids_TLK in sequences:
        hit_TLK = np.empty((len(ids_TLK), placement.num_layers, ids_TLK.shape[2]), dtype=np.bool_)
        for token, ids in enumerate(np.tile(ids_TLK, (1, copies, 1))):
            wishes = pending[step % len(pending)]
            matches = placement.match_step(ids, wishes.victims_LV, wishes.admit_LE)
            placement.apply(matches)
            policy.observe(ids)
            policy.wishes(placement, out=wishes)
            step += 1
            hit_TLK[token] = matches.hit_LN
        hits.append(hit_TLK.sum(axis=(0, 2)))
    return np.stack(hits)


def simulate(
    trace: Trace,
    conditions: Sequence[Condition],
    *,
    prior_LE: FloatArray | None = None,
    forecast: Forecast | None = None,
    num_victims: int = NUM_VICTIMS,
    wish_lag: int = 0,
    progress: Callable[[str], None] | None = None,
) -> list[Result]:
    """Hits of every condition, in the order given.

    Adaptive policies and Belady start with experts 0..C-1 of each layer, static ones with those
    of the highest prior.

    Args:
        prior_LE: uses per token expected of each expert, of a profile.
        forecast: of a profile, for policy `forecast`.
        num_victims: V of the match rule.
        wish_lag: see `replay`.
        progress: is told the name of each group of conditions before it is replayed.

    Raises:
        ConfigError: a condition needs a prior or a forecast and there is none.
    """
    for condition in conditions:
        known = forecast if condition.policy == ForecastPolicy.name else prior_LE
        if known is None and (condition.policy in NEEDS_PROFILE or condition.prior_weight):
            raise ConfigError(
                f"`{condition.label}` needs a profile", hint="give one with `--profile-from`"
            )
    counts_QLE = np.stack([trace.counts(sequence) for sequence in trace.sequences])
    uses_Q = counts_QLE.sum(axis=(1, 2))
    results: dict[Condition, Result] = {}
    kinds = dict.fromkeys((condition.policy, condition.prior_weight) for condition in conditions)
    for policy, weight in kinds:
        group = [c for c in conditions if (c.policy, c.prior_weight) == (policy, weight)]
        if progress is not None:
            progress(policy)
        if policy == HINDSIGHT:
            hits = _hindsight(trace, group, counts_QLE)
        elif policy == BELADY:
            hits = belady(list(trace), _first_experts(trace, group)).sum(axis=2).T
        elif issubclass(POLICIES[policy], ScoredPolicy):
            side_by_side = _side_by_side(
                trace, group, prior_LE if weight else None, forecast, num_victims=num_victims
            )
            hits = _adaptive(trace, group, side_by_side, wish_lag=wish_lag)
        else:
            hits = _fixed(trace, group, prior_LE, counts_QLE)
        for condition, hits_Q in zip(group, hits, strict=True):
            results[condition] = Result(condition, hits_Q, uses_Q)
    return [results[condition] for condition in conditions]


def _side_by_side(
    trace: Trace,
    group: list[Condition],
    prior_LE: FloatArray | None,
    forecast: Forecast | None,
    *,
    num_victims: int,
) -> Policy:
    """One policy for conditions that differ in slots and half-life: a layer for each layer of each.

    They share the policy's name and the prior's weight.
    """
    copies, first = len(group), group[0]
    half_life = None
    if first.policy == HalfLife.name:
        each = np.array([condition.half_life for condition in group], dtype=np.float64)
        half_life = np.repeat(each, trace.num_layers)
    return make_policy(
        first.policy,
        num_experts=trace.num_experts * copies,
        prior_LE=None if prior_LE is None else np.tile(prior_LE, (copies, 1)),
        half_life=half_life,
        prior_weight=None if half_life is None else first.prior_weight,
        forecast=None if forecast is None else forecast.repeat(copies),
        num_victims=num_victims,
    )


def _adaptive(trace: Trace, group: list[Condition], policy: Policy, *, wish_lag: int) -> IntArray:
    """[C, Q] hits of conditions side by side, all starting with experts 0..C-1."""
    num_experts = trace.num_experts * len(group)
    slots = np.concatenate([condition.slots_per_layer(trace.num_experts) for condition in group])
    pools = SlotPools.uniform(num_experts, slots.tolist())
    start = top_experts(np.zeros(policy.shape), policy.num_experts, slots)
    placement = Placement.from_residents(pools, start)
    hits = replay(trace, policy, placement, copies=len(group), wish_lag=wish_lag)
    by_layer = hits.reshape(len(hits), len(group), trace.num_layers)
    per_sequence: IntArray = by_layer.sum(axis=2).T
    return per_sequence


def _fixed(
    trace: Trace, group: list[Condition], prior_LE: FloatArray | None, counts_QLE: IntArray
) -> IntArray:
    """[C, Q] hits of conditions of a policy that never moves an expert: sums of counts."""
    hits = []
    for condition in group:
        slots = condition.slots_per_layer(trace.num_experts)
        policy = make_policy(condition.policy, num_experts=trace.num_experts, prior_LE=prior_LE)
        pools = SlotPools.uniform(trace.num_experts, slots.tolist())
        resident = policy.initial(pools, slots_per_layer=slots)
        hits.append((counts_QLE * resident).sum(axis=(1, 2)))
    return np.stack(hits)


def _hindsight(trace: Trace, group: list[Condition], counts_QLE: IntArray) -> IntArray:
    """[C, Q] hits of the best static set of each sequence and layer, chosen after the fact."""
    best = -np.sort(-counts_QLE, axis=2)
    rank = np.arange(best.shape[2])
    return np.stack(
        [
            (best * (rank < condition.slots_per_layer(trace.num_experts)[:, None])).sum(axis=(1, 2))
            for condition in group
        ]
    )


def _first_experts(trace: Trace, group: list[Condition]) -> BoolArray:
    """[C, L, E] experts 0..C-1 of each layer."""
    rank = np.arange(trace.max_experts)
    return np.stack([rank < c.slots_per_layer(trace.num_experts)[:, None] for c in group])
