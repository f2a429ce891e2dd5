"""Draws hit rate over slots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotset.cli.plotting import COLOURS, OTHER, Curve, draw_curves
from hotset.core.simulator import OFFLINE, Result


def draw(results: Sequence[Result], path: Path, *, title: str) -> None:
    """Writes the picture: one line per policy, of the half-lives only the best at each point."""
    curves = (
        Curve(
            "half-life (best of those replayed)" if policy == "half-life" else policy,
            [(100 * slots, 100 * rate) for slots, rate in points.items()],
            colour=COLOURS.get(policy, OTHER),
            dashed=policy in OFFLINE,
        )
        for policy, points in _points(results).items()
    )
    draw_curves(
        curves,
        path,
        title=title,
        x="experts with a slot, %",
        y="routed experts that hit, %",
        legend="lower right",
        adjust=_percents,
    )


def _points(results: Sequence[Result]) -> dict[str, dict[float, float]]:
    """Hit rate by slots for each policy, best policies first, as the legend should have them."""
    curves: dict[str, dict[float, float]] = {}
    for result in results:
        points = curves.setdefault(result.condition.policy, {})
        slots = result.condition.slots
        points[slots] = max(points.get(slots, 0.0), result.hit_rate)
    mean = {policy: sum(points.values()) / len(points) for policy, points in curves.items()}
    return dict(sorted(curves.items(), key=lambda curve: -mean[curve[0]]))


def _percents(axes: Any) -> None:
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 101)
    axes.set_xticks(range(0, 101, 10))
    axes.set_yticks(range(0, 101, 10))
