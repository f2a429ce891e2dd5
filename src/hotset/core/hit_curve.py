"""How many of the routed experts have a slot, as a function of how many slots there are.

Knows shares of experts and of uses, and where a curve comes from; refuses to know bytes and time.
A curve is replayed from a trace, counted from a profile, or assumed, and says which.

Letters: T tokens, L MoE layers, K top-k, R rows decoded side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotset.core.costmodel import distinct_experts
from hotset.core.errors import ConfigError
from hotset.core.geometry import MoELayer
from hotset.core.policy import DEFAULT_HALF_LIFE, HalfLife
from hotset.core.profile import PolicyReplay, Profile
from hotset.core.simulator import Condition, simulate
from hotset.core.trace import Trace, TraceSequence

SHARES = (0.0, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)
"""Where curves are sampled: closer where they are steeper."""

HALF_LIVES = (8.0, 16.0, 32.0, 64.0)

MOST_TOKENS = 4096
"""Of a trace that is replayed for a curve: enough for 0.01, and a second or two."""


@dataclass(frozen=True)
class HitCurve:
    """Hit rate over the share of experts that have a slot, straight lines between the points.

    Attributes:
        shares: ascending, from 0 to 1.
        hit_rates: at each, never falling; 0 without slots and 1 with all.
        source: where it comes from, one phrase.
        assumed: it was taken from other models.
        num_rows: sequences that a step decodes side by side; hits are of distinct experts.
        half_life: that it was replayed with, steps; `None` for a set that does not move.
        half_life_note: why this one, and what has to be set for it; one phrase.
        used_share: share of a layer's experts that one step uses; `None` where nobody counted,
            then as if each were as likely.
    """

    shares: tuple[float, ...]
    hit_rates: tuple[float, ...]
    source: str
    assumed: bool = False
    num_rows: int = 1
    half_life: float | None = None
    half_life_note: str = ""
    used_share: float | None = None

    def at(self, share: float) -> float:
        """Hit rate where that share of a layer's experts has a slot."""
        return float(np.interp(share, self.shares, self.hit_rates))

    def used(self, layer: MoELayer) -> float:
        """Distinct experts of a layer in one step."""
        if self.used_share is not None:
            return self.used_share * layer.num_experts
        return distinct_experts(layer, self.num_rows)

    def replayed(self) -> PolicyReplay:
        """What a profile keeps of a curve that was replayed."""
        assert self.half_life is not None
        return PolicyReplay(self.half_life, self.shares, self.hit_rates)

    @classmethod
    def from_trace(
        cls, trace: Trace, *, num_rows: int = 1, half_lives: Sequence[float] = HALF_LIVES
    ) -> HitCurve:
        """Replays the beginning of each sequence under the engine's policy, wishes one step late.

        Args:
            num_rows: sequences that a step decodes side by side; the uses of a step are the
                distinct experts of all of them.
            half_lives: of which the one with the most hits over all shares is taken.

        Raises:
            ConfigError: fewer sequences than rows.
        """
        replayed = beside_each_other(shortened(trace, MOST_TOKENS * num_rows), num_rows)
        inner = SHARES[1:-1]
        conditions = [
            Condition(HalfLife.name, share, half_life)
            for half_life in half_lives
            for share in inner
        ]
        results = simulate(replayed, conditions, wish_lag=1)
        rates = np.array([r.hit_rate for r in results]).reshape(len(half_lives), len(inner))
        best = int(rates.sum(axis=1).argmax())
        name = trace.info.model or "a trace"
        rows = "" if num_rows == 1 else f", {num_rows} rows a step"
        return cls(
            shares=SHARES,
            hit_rates=_rising([0.0, *rates[best].tolist(), 1.0]),
            source=f"{replayed.num_tokens * num_rows:,} tokens of {name} replayed with half-life "
            f"{half_lives[best]:g}{rows}",
            num_rows=num_rows,
            half_life=float(half_lives[best]),
            half_life_note=f"the most hits on the trace, of {_listed(half_lives)}: `--half-life`",
            used_share=_used_share(replayed),
        )

    @classmethod
    def from_profile(cls, profile: Profile, *, num_rows: int = 1) -> HitCurve:
        """For one row the profile's own replay, if it has one; else what its most used experts
        cover: a set that does not move. Both on the text that it was made from.

        Args:
            num_rows: sequences that a step decodes side by side, as if independent: an expert that
                a token uses with chance p is used by R rows with 1 - (1 - p)^R.
        """
        name = profile.model or "this model"
        if profile.replay is not None and num_rows == 1:
            return cls(
                shares=profile.replay.shares,
                hit_rates=_rising(profile.replay.hit_rates),
                source=f"the replay in the profile of {name}",
                half_life=profile.replay.half_life,
                half_life_note="the most hits on the profile's text; an engine with `--profile` "
                "takes it",
            )
        chance_LE = 1 - (1 - np.minimum(1.0, -np.sort(-profile.prior, axis=1))) ** num_rows
        width = np.array(profile.fingerprint.num_experts)[:, None]
        rank, total = np.arange(chance_LE.shape[1]), max(1e-9, float(chance_LE.sum()))
        rates = [float((chance_LE * (rank < np.round(s * width))).sum()) / total for s in SHARES]
        return cls(
            shares=SHARES,
            hit_rates=_rising(rates),
            source=f"what the most used experts cover of {profile.num_tokens:,} tokens of the "
            f"profile of {name}; a policy that follows the text has more",
            num_rows=num_rows,
            used_share=total / float(width.sum()),
        )


_ASSUMED = {
    1: (0.0, 0.305, 0.477, 0.596, 0.686, 0.812, 0.890, 0.940, 0.971, 0.991, 1.0),
    2: (0.0, 0.237, 0.397, 0.517, 0.614, 0.758, 0.855, 0.920, 0.962, 0.988, 1.0),
    4: (0.0, 0.178, 0.318, 0.434, 0.533, 0.691, 0.807, 0.890, 0.948, 0.983, 1.0),
    8: (0.0, 0.130, 0.247, 0.353, 0.449, 0.615, 0.749, 0.852, 0.928, 0.976, 1.0),
    16: (0.0, 0.097, 0.192, 0.282, 0.369, 0.530, 0.672, 0.794, 0.891, 0.962, 1.0),
}
"""Hit rates at `SHARES` by rows of a step, half-life 16, wishes one step late: means over three
recorded models (gpt-oss-20b, a 54M and a 6M model, the even sequences up to 4 rows, all from 8)."""

_ASSUMED_RANGE = {1: (0.66, 0.80), 2: (0.58, 0.75), 4: (0.48, 0.69), 8: (0.40, 0.53)}
"""Of these models at a quarter of the slots."""


def assumed_curve(num_rows: int = 1) -> HitCurve:
    """For a model that nobody recorded: the mean of three others.

    Args:
        num_rows: sequences that a step decodes side by side. Beyond 16 the curve of 16 is taken.
    """
    known = sorted(_ASSUMED)
    place = np.log2(min(num_rows, known[-1]))
    rates = np.array([_ASSUMED[rows] for rows in known])
    mixed = [float(np.interp(place, np.log2(known), column)) for column in rates.T]
    low, high = _ASSUMED_RANGE[max(rows for rows in _ASSUMED_RANGE if rows <= num_rows)]
    return HitCurve(
        shares=SHARES,
        hit_rates=tuple(mixed),
        source=f"the mean of gpt-oss-20b, a 54M and a 6M model; at a quarter of the slots these "
        f"have {low:.2f} to {high:.2f}, and this model may lie outside",
        assumed=True,
        num_rows=num_rows,
        half_life=DEFAULT_HALF_LIFE,
        half_life_note="the policy's own",
    )


def shortened(trace: Trace, num_tokens: int) -> Trace:
    """The trace with about that many tokens at most: whole sequences, evenly spaced."""
    step = max(1, round(trace.num_tokens / num_tokens))
    return replace(trace, sequences=trace.sequences[::step])


def beside_each_other(trace: Trace, num_rows: int) -> Trace:
    """The same sequences as rows of one batch: row r has sequences r, r + R, ... one after the
    other. What the longer rows have beyond the shortest is left out.

    Returns:
        One sequence with ids [T, L, R*K], an expert once in each layer of a step.

    Raises:
        ConfigError: fewer sequences than rows.
    """
    if num_rows == 1:
        return trace
    if len(trace.sequences) < num_rows:
        raise ConfigError(
            f"the trace has {len(trace.sequences)} sequences, {num_rows} rows need one each",
            hint=f"use at most {len(trace.sequences)} rows, or record more texts",
        )
    parts = [trace.ids_TLK[s.start : s.start + s.num_tokens] for s in trace.sequences]
    rows = [np.concatenate(parts[row::num_rows]) for row in range(num_rows)]
    length = min(len(row) for row in rows)
    ids_TLN = np.sort(np.concatenate([row[:length] for row in rows], axis=2), axis=2)
    again = np.zeros(ids_TLN.shape, dtype=np.bool_)
    again[:, :, 1:] = ids_TLN[:, :, 1:] == ids_TLN[:, :, :-1]
    ids_TLN[again] = np.iinfo(ids_TLN.dtype).max
    return replace(
        trace, ids_TLK=ids_TLN, sequences=(TraceSequence(0, 0, length),), token_ids_T=None
    )


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _used_share(trace: Trace) -> float:
    """Mean share of a layer's experts that a step uses; ids are distinct within a layer."""
    used_L = trace.total_counts().sum(axis=1) / trace.num_tokens
    return float((used_L / np.array(trace.num_experts)).mean())


def _rising(rates: Sequence[float]) -> tuple[float, ...]:
    """Noise of a short trace taken out: more slots never have fewer hits."""
    return tuple(np.maximum.accumulate(np.asarray(rates, dtype=np.float64)).tolist())
