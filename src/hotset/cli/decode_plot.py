"""Draws tokens per second over slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.cli.plotting import COLOURS, OTHER, OURS, Curve, draw_curves

if TYPE_CHECKING:
    from hotset.bench.rows import Row

NO_CACHE, OFFLOAD = "no cache", "accelerate offload"
HALF_LIFE = "half-life"
_COMPARED = {NO_CACHE: "#222222", OFFLOAD: OTHER}
_SHADES = (OURS, "#7bc8a4", "#0d4d32", "#a9d15c", "#4f9d9d", "#c9e3d4")
_MARKERS = "os^Dv*"


def draw(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Writes the picture: one line for each policy and batch size, and what they are compared
    with dashed."""
    draw_curves(
        lines(rows),
        path,
        title=title,
        x="experts with a slot, %",
        y="tokens/s of all rows",
        adjust=_from_zero,
    )


def lines(rows: Sequence[Row]) -> list[Curve]:
    """The curves: a colour for each policy and half-life, a marker for each batch size."""
    found = points(rows)
    half_lives = [name for name, _ in found if name.startswith(HALF_LIFE)]
    shades = dict(zip(dict.fromkeys(half_lives), _SHADES, strict=False))
    batches = list(dict.fromkeys(batch for _, batch in found))
    return [
        Curve(
            f"{name}, {batch}" if batch else name,
            at,
            colour=shades.get(name) or _COMPARED.get(name) or COLOURS.get(name, "#7b4fb5"),
            dashed=name in _COMPARED,
            marker=_MARKERS[batches.index(batch) % len(_MARKERS)],
        )
        for (name, batch), at in found.items()
    ]


def points(rows: Sequence[Row]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(percent of the experts in slots, tokens/s) of each policy and batch size.

    Without a cache it is the same for any number of slots.
    """
    found: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    flat: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.bench != "decode" or row.figure != "decode":
            continue
        _, *words = row.case.split(", ")
        batch = words.pop() if words[-1].startswith("batch ") else ""
        *words, _ = words  # without the context
        if words == [NO_CACHE]:
            flat[NO_CACHE, batch] = row.p50
        else:
            share, name = words
            found[name, batch].append((float(share.split("%")[0]), row.p50))
    slots = sorted({at for line in found.values() for at, _ in line}) or [0.0]
    for key, speed in flat.items():
        found[key] = [(at, speed) for at in slots]
    return dict(found)


def _from_zero(axes: Any) -> None:
    axes.set_ylim(bottom=0)
