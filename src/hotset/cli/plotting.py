"""One look for every picture of curves. Needs matplotlib, which is an optional extra."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotset.cli.outputs import check_writable
from hotset.core.errors import ConfigError

SUFFIXES = (".png", ".svg")
OTHER = "#8a8a8a"
OURS = "#1b8a5a"
_MOST_INSIDE = 7  # names in a legend that leaves room for the curves
COLOURS = {
    "belady": "#222222",
    "hindsight-static": "#777777",
    "lru": "#2a7ab9",
    "static-uniform": "#c44e3a",
    "static-global": "#e2a13a",
    "half-life": OURS,
    "forecast": "#7b4fb5",
}


@dataclass(frozen=True)
class Curve:
    """Points that a line joins.

    Attributes:
        points: (x, y) in any order.
        colour: `None` for the next one of matplotlib's.
        dashed: what bounds or is compared with, rather than what is measured.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str | None = None
    dashed: bool = False
    marker: str = "o"


def check_plot_path(path: Path, *, flag: str = "--plot") -> None:
    """Refuses a picture that could not be drawn, before any work is done.

    Raises:
        ConfigError: another suffix, no file that can be written, or matplotlib is missing.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"`{flag}` is `{path}`", hint=f"end it in {' or '.join(SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"`{flag}` is `{path}`, but there is no folder `{path.parent}`")
    check_writable(path, flag=flag)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"`{flag}` needs matplotlib, which is not installed",
            hint='install it with `pip install "hotset[plot]"`',
        ) from error


def draw_curves(
    curves: Iterable[Curve],
    path: Path,
    *,
    title: str,
    x: str,
    y: str,
    legend: Literal["best", "lower right", "upper left"] = "best",
    adjust: Callable[[Any], None] = lambda axes: None,
) -> None:
    """Writes a picture of lines; `check_plot_path` has looked at the path.

    Args:
        x, y: what the axes show, with units.
        legend: where it goes; beside the picture, where it has many names.
        adjust: given the axes at the end, for scales and limits.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    curves = list(curves)
    for curve in curves:
        xs, ys = zip(*sorted(curve.points), strict=True)
        axes.plot(
            xs,
            ys,
            label=curve.name,
            color=curve.colour,
            linestyle="--" if curve.dashed else "-",
            linewidth=1.5,
            marker=curve.marker,
            markersize=3.5,
            clip_on=False,
            zorder=3,
        )
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > _MOST_INSIDE:
        figure.legend(loc="outside right center", frameon=False, fontsize=8)
    else:
        axes.legend(loc=legend, frameon=False, fontsize=9)
    adjust(axes)
    figure.savefig(path, dpi=150)
