"""Draws times of prompts over their lengths. Needs matplotlib, which is an optional extra."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotset.bench.rows import Row

_OURS, _LIGHT = "hotset", "speed of light"
_COLOURS = {_OURS: "#1b8a5a", _LIGHT: "#222222"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the picture; `simulate_plot.check_plot_path` has looked at the path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves(rows).items():
        lengths, times = zip(*sorted(points), strict=True)
        style = "--" if name == _LIGHT else "o-"
        axes.plot(lengths, times, style, label=name, color=_COLOURS.get(name), markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to the first token, ms")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def curves(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """(tokens, milliseconds) of each kind of run, ours and the speed of light first."""
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if row.bench != "prefill" or row.figure != "first token":
            continue
        parts = row.case.split(", ")
        length = int(next(part for part in parts if part.endswith(" tokens")).split()[0])
        if row.sol is not None:
            found[_OURS].append((length, row.p50))
            found[_LIGHT].append((length, row.sol))
        else:
            tail = parts[parts.index(f"{length} tokens") + 1 :]
            found[", ".join(tail)].append((length, row.p50))
    return dict(found)
