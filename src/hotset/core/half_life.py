"""Which half-life had the most hits in a replay, and how sure that is. Knows results only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotset.core.simulator import Result


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
