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
from hotset.core.placement import Placement
from hotset.core.policy import (
    NUM_VICTIMS,
    POLICIES,
    FloatArray,
    HalfLife,
    Lru,
    Policy,
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

NEEDS_PROFILE = (StaticUniform.name, StaticGlobal.name)


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
            raise ConfigError(f"`slots` is {self.slots:g}, it is a fraction of the experts, 0..1")
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
    num_victims: int = NUM_VICTIMS,
    wish_lag: int = 0,
    progress: Callable[[str], None] | None = None,
) -> list[Result]:
    """Hits of every condition, in the order given.

    Adaptive policies and Belady start with experts 0..C-1 of each layer, static ones with those
    of the highest prior.

    Args:
        prior_LE: uses per token expected of each expert, of a profile.
        num_victims: V of the match rule.
        wish_lag: see `replay`.
        progress: is told the name of each group of conditions before it is replayed.

    Raises:
        ConfigError: a condition needs a prior and there is none.
    """
    for condition in conditions:
        if prior_LE is None and (condition.policy in NEEDS_PROFILE or condition.prior_weight):
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
        elif policy in (HalfLife.name, Lru.name):
            hits = _adaptive(
                trace,
                group,
                prior_LE if weight else None,
                num_victims=num_victims,
                wish_lag=wish_lag,
            )
        else:
            hits = _fixed(trace, group, prior_LE, counts_QLE)
        for condition, hits_Q in zip(group, hits, strict=True):
            results[condition] = Result(condition, hits_Q, uses_Q)
    return [results[condition] for condition in conditions]


def _adaptive(
    trace: Trace,
    group: list[Condition],
    prior_LE: FloatArray | None,
    *,
    num_victims: int,
    wish_lag: int,
) -> IntArray:
    """[C, Q] hits of conditions of one adaptive policy and prior weight, side by side."""
    num_experts = trace.num_experts * len(group)
    slots = np.concatenate([condition.slots_per_layer(trace.num_experts) for condition in group])
    half_life, weight = None, None
    if group[0].policy == HalfLife.name:
        half_life = np.repeat(
            np.array([condition.half_life for condition in group], dtype=np.float64),
            trace.num_layers,
        )
        weight = group[0].prior_weight
    policy = make_policy(
        group[0].policy,
        num_experts=num_experts,
        prior_LE=None if prior_LE is None else np.tile(prior_LE, (len(group), 1)),
        half_life=half_life,
        prior_weight=weight,
        num_victims=num_victims,
    )
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


@dataclass(frozen=True)
class HalfLifeChoice:
    """The half-life with the most hits at one slot count, and how sure that is.

    Attributes:
        half_life: of the highest hit rate.
        low, high: 95% interval of the best half-life over resampled sequences.
        hit_rate, hit_rate_low, hit_rate_high: at `half_life`, with its 95% interval.
        share: of the resamples in which this half-life was the best.
    """

    slots: float
    prior_weight: float
    half_life: float
    low: float
    high: float
    hit_rate: float
    hit_rate_low: float
    hit_rate_high: float
    share: float


def best_half_life(
    results: Sequence[Result], *, num_resamples: int = 1000, seed: int = 0
) -> list[HalfLifeChoice]:
    """Picks the half-life per slot count, with a bootstrap over sequences (Efron 1979).

    Sequences are drawn with replacement, the same draws for all half-lives. Within the interval
    the choice does not matter on this trace.

    Args:
        results: of `simulate`; those of other policies are left out. One choice per slot count
            and prior weight.
    """
    random = np.random.default_rng(seed)
    choices = []
    own = [result for result in results if result.condition.half_life is not None]
    kinds = dict.fromkeys((r.condition.slots, r.condition.prior_weight) for r in own)
    for slots, weight in kinds:
        group = [r for r in own if (r.condition.slots, r.condition.prior_weight) == (slots, weight)]
        hits_CQ = np.stack([result.hits_Q for result in group])
        uses_Q = group[0].uses_Q
        draws = random.integers(len(uses_Q), size=(num_resamples, len(uses_Q)))
        rates = hits_CQ[:, draws].sum(axis=2) / uses_Q[draws].sum(axis=1)
        half_lives = np.array([result.condition.half_life for result in group], dtype=np.float64)
        best = int(np.argmax([result.hit_rate for result in group]))
        winners = rates.argmax(axis=0)
        low, high = np.quantile(half_lives[winners], [0.025, 0.975], method="nearest")
        rate_low, rate_high = np.quantile(rates[best], [0.025, 0.975])
        choices.append(
            HalfLifeChoice(
                slots=slots,
                prior_weight=weight,
                half_life=float(half_lives[best]),
                low=float(low),
                high=float(high),
                hit_rate=group[best].hit_rate,
                hit_rate_low=float(rate_low),
                hit_rate_high=float(rate_high),
                share=float((winners == best).mean()),
            )
        )
    return choices
