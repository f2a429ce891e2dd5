"""Draws times of prompts over their lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.cli.plotting import OURS, Curve, draw_curves

if TYPE_CHECKING:
    from hotset.bench.rows import Row

_OURS, _LIGHT = "hotset", "speed of light"
_COLOURS = {_OURS: OURS, _LIGHT: "#222222"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the picture."""
    lines = (
        Curve(name, points, colour=_COLOURS.get(name), dashed=name == _LIGHT)
        for name, points in curves(rows).items()
    )
    draw_curves(
        lines,
        path,
        title=rows[0].case.split(",")[0],
        x="prompt tokens",
        y="time to the first token, ms",
        adjust=_logarithmic,
    )


def _logarithmic(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")


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
