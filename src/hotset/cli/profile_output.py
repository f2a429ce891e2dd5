"""Profiles, their differences and scores as tables for people and as rows for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from hotset.cli.outputs import table_console
from hotset.core.profile import PolicyReplay, Profile, ProfileDiff
from hotset.core.trace import Trace

BAR_CELLS = 16


@dataclass(frozen=True)
class Score:
    """What a fixed hot set of a profile hits.

    Attributes:
        slots: share of the experts.
        own: on the profile's own text.
        uniform, of_all_layers: on other text, with as many slots in each layer, and with slots
            dealt out over all layers.
    """

    slots: float
    own: float
    uniform: float
    of_all_layers: float

    @property
    def is_worse_than_none(self) -> bool:
        return max(self.uniform, self.of_all_layers) < self.slots


def profile_data(profile: Profile, slots: Sequence[float]) -> dict[str, Any]:
    """The profile's figures; coverage is of the hot set of each share of slots."""
    covered = [profile.coverage_of_layers(fraction) for fraction in slots]
    return {
        "model": profile.model,
        "fingerprint": profile.fingerprint.to_json(),
        "source": profile.source,
        "tokens": profile.num_tokens,
        "sequences": profile.num_sequences,
        "forecast": profile.forecast is not None,
        "replay": None if profile.replay is None else asdict(profile.replay),
        "rows": [
            {
                "slots": fraction,
                "coverage": profile.expected_hit_rate(fraction),
                "coverage_of_layers": values.tolist(),
            }
            for fraction, values in zip(slots, covered, strict=True)
        ],
        "effective_experts": profile.effective_experts().tolist(),
        "median_reuse_tokens": [_median_reuse(row) for row in profile.reuse_LB],
    }


def print_profile(profile: Profile, slots: Sequence[float], *, title: str) -> None:
    """Prints a head, a line per layer, and all layers together."""
    console = table_console()
    fingerprint = profile.fingerprint
    head = (
        f"{title}: {profile.model or 'a model'}, {len(fingerprint.num_experts)} layers, "
        f"{max(fingerprint.num_experts)} experts, {profile.num_tokens:,} tokens of "
        f"{profile.source or 'some text'}"
    )
    console.print(Text(head, style="bold"), soft_wrap=True)
    hashed = fingerprint.router_hash[:12] or "unknown, so it fits every model of this shape"
    forecast = "" if profile.forecast is not None else "no "
    console.print(Text(f"router hash {hashed}; {forecast}forecast"), soft_wrap=True)
    if profile.replay is not None:
        console.print(Text(_replay_words(profile.replay, slots)), soft_wrap=True)
    covered = [profile.coverage_of_layers(fraction) for fraction in slots]
    effective = profile.effective_experts()
    table = Table(show_edge=False)
    for name in ("layer", "effective", "again after", *(f"in {share:.4g}" for share in slots)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for layer in range(len(effective)):
        shares = [values[layer] for values in covered]
        table.add_row(
            str(layer),
            f"{effective[layer]:.1f}",
            _reuse_words(profile.reuse_LB[layer]),
            *(f"{share:.3f}" for share in shares),
            _bar(shares[len(shares) // 2]),
        )
    table.add_section()
    table.add_row(
        "all", "", "", *(f"{profile.expected_hit_rate(fraction):.3f}" for fraction in slots), ""
    )
    console.print(table)
    console.print(
        "effective: so many experts used evenly would be as uneven (exp of the entropy); again "
        "after: tokens until\nthe median use of an expert comes again; in: uses that the hot set "
        "of this share of the experts covers",
        highlight=False,
        soft_wrap=True,
    )


def _replay_words(replay: PolicyReplay, slots: Sequence[float]) -> str:
    rates = (
        f"{np.interp(share, replay.shares, replay.hit_rates):.3f} in {share:.4g}" for share in slots
    )
    return f"followed with half-life {replay.half_life:g}, its text has hits of {', '.join(rates)}"


def diff_data(differences: Sequence[ProfileDiff]) -> dict[str, Any]:
    """Rows by share of slots, and the distance of uses by layer, which has none."""
    return {
        "total_variation_of_layers": differences[0].total_variation_L.tolist(),
        "rows": [
            {
                "slots": difference.slots,
                "shared_hot": float(difference.shared_hot_L.mean()),
                "shared_hot_of_layers": difference.shared_hot_L.tolist(),
                "own_coverage": difference.own_coverage,
                "cross_coverage": difference.cross_coverage,
            }
            for difference in differences
        ],
    }


def print_diff(differences: Sequence[ProfileDiff], *, names: tuple[str, str]) -> None:
    """Prints what the second text loses with the first one's hot set."""
    console = table_console()
    variation = differences[0].total_variation_L
    head = (
        f"{names[0]} against {names[1]}: uses differ by {variation.mean():.3f} "
        f"({variation.min():.3f} to {variation.max():.3f} by layer; 0 is equal, 1 is disjoint)"
    )
    console.print(Text(head), soft_wrap=True)
    table = Table(show_edge=False)
    for name in ("slots", "hot experts in both", "second's own hot set", "first's hot set"):
        table.add_column(name, justify="right")
    for difference in differences:
        table.add_row(
            f"{difference.slots:.4g}",
            f"{difference.shared_hot_L.mean():.3f}",
            f"{difference.own_coverage:.3f}",
            f"{difference.cross_coverage:.3f}",
        )
    console.print(table)


def score_data(scores: Sequence[Score], trace: Trace) -> dict[str, Any]:
    """Rows by share of slots."""
    rows = [{**asdict(score), "worse_than_none": score.is_worse_than_none} for score in scores]
    return {"tokens": trace.num_tokens, "sequences": len(trace.sequences), "rows": rows}


def print_scores(scores: Sequence[Score], *, title: str) -> None:
    """Prints promise and truth side by side."""
    console = table_console()
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(show_edge=False)
    for name in ("slots", "own text", "each layer", "all layers", "blindly", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for score in scores:
        table.add_row(
            f"{score.slots:.4g}",
            f"{score.own:.3f}",
            f"{score.uniform:.3f}",
            f"{score.of_all_layers:.3f}",
            f"{score.slots:.3f}",
            "worse than none" if score.is_worse_than_none else "",
        )
    console.print(table)
    console.print(
        "hit rates of fixed hot sets: on the profile's own text; on this one with as many slots in "
        "each layer, and\nwith slots dealt out over all layers; and of experts chosen blindly",
        highlight=False,
        soft_wrap=True,
    )


def _median_reuse(counts_B: np.ndarray) -> int | None:
    """Lower end of the bucket in which the median use finds its expert used before."""
    if not counts_B.sum():
        return None
    return int(2 ** int(np.searchsorted(np.cumsum(counts_B), counts_B.sum() / 2)))


def _reuse_words(counts_B: np.ndarray) -> str:
    tokens = _median_reuse(counts_B)
    return "never" if tokens is None else f"{tokens} to {2 * tokens - 1}" if tokens > 1 else "1"


def _bar(share: float) -> str:
    return "#" * round(share * BAR_CELLS)
