"""Draws hit rate over slots. Needs matplotlib, which is an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotset.core.errors import ConfigError
from hotset.core.simulator import OFFLINE, Result

SUFFIXES = (".png", ".svg")
OTHER = "#8a8a8a"
COLOURS = {
    "belady": "#222222",
    "hindsight-static": "#777777",
    "lru": "#2a7ab9",
    "static-uniform": "#c44e3a",
    "static-global": "#e2a13a",
    "half-life": "#1b8a5a",
    "forecast": "#7b4fb5",
}


def check_plot_path(path: Path, *, flag: str = "--plot") -> None:
    """Refuses a picture that could not be drawn, before any work is done.

    Raises:
        ConfigError: another suffix, no such folder, or matplotlib is missing.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"`{flag}` is `{path}`", hint=f"end it in {' or '.join(SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"`{flag}` is `{path}`, but there is no folder `{path.parent}`")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"`{flag}` needs matplotlib, which is not installed",
            hint='install it with `pip install "hotset[plot]"`',
        ) from error


def draw(results: Sequence[Result], path: Path, *, title: str) -> None:
    """Writes the picture: one line per policy, of the half-lives only the best at each point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    curves = _curves(results)
    for policy, points in curves.items():
        slots, rates = zip(*sorted(points.items()), strict=True)
        axes.plot(
            [100 * fraction for fraction in slots],
            [100 * rate for rate in rates],
            label="half-life (best of those replayed)" if policy == "half-life" else policy,
            color=COLOURS.get(policy, OTHER),
            linestyle="--" if policy in OFFLINE else "-",
            linewidth=1.5,
            marker="o",
            markersize=3.5,
            clip_on=False,
            zorder=3,
        )
    _decorate(axes, title)
    figure.savefig(path, dpi=150)


def _curves(results: Sequence[Result]) -> dict[str, dict[float, float]]:
    """Hit rate by slots for each policy, best policies first, as the legend should have them."""
    curves: dict[str, dict[float, float]] = {}
    for result in results:
        points = curves.setdefault(result.condition.policy, {})
        slots = result.condition.slots
        points[slots] = max(points.get(slots, 0.0), result.hit_rate)
    mean = {policy: sum(points.values()) / len(points) for policy, points in curves.items()}
    return dict(sorted(curves.items(), key=lambda curve: -mean[curve[0]]))


def _decorate(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("experts with a slot, %")
    axes.set_ylabel("routed experts that hit, %")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 101)
    axes.set_xticks(range(0, 101, 10))
    axes.set_yticks(range(0, 101, 10))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
