"""Flags that benchmarks share, and how their rows are shown and kept."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli.options import check_count
from hotset.core.errors import ConfigError
from hotset.core.formats import USUAL, WeightFormat
from hotset.core.geometry import MAX_LAYERS
from hotset.core.units import format_bytes

if TYPE_CHECKING:
    from hotset.bench.rows import Row

Shape = Annotated[str, typer.Option(help="Published shape, e.g. `qwen3-30b-a3b`, or `tiny`.")]
Layers = Annotated[int | None, typer.Option(help="Layers, instead of as many as the shape has.")]
Format = Annotated[
    str, typer.Option("--format", help=f"Format of experts' weights: {', '.join(USUAL)}.")
]
Rows = Annotated[Path | None, typer.Option("--rows", help="Append the rows to this file.")]


def weight_format(name: str) -> WeightFormat:
    if name not in USUAL:
        raise ConfigError(f"`--format {name}` is not one of {', '.join(USUAL)}")
    return USUAL[name]


def check_layers(layers: int | None) -> None:
    check_count("--layers", layers, most=MAX_LAYERS)


def case_name(shape: str, format_: str) -> str:
    """What rows call a model: its shape and, unless it is plain, its format."""
    return shape if format_ == "plain" else f"{shape} {format_}"


def report(rows: Iterable[Row], file: Path | None, *, as_json: bool) -> list[Row]:
    """Prints each row as it comes, then keeps them; returns them."""
    from hotset.bench.rows import append

    kept = []
    for row in rows:
        kept.append(row)
        if not as_json:
            typer.echo(_line(row))
    if as_json:
        typer.echo(json.dumps({"rows": [json.loads(row.to_json()) for row in kept]}))
    if file is not None:
        append(kept, file)
    return kept


def _line(row: Row) -> str:
    """A row for people."""
    against = "" if row.sol is None else f", speed of light {_with_unit(row.sol, row.unit)}"
    ratio = "" if row.ratio_to_sol is None else f" ({row.ratio_to_sol:.3f} of it)"
    if row.ratio_to_baseline is not None:
        ratio += f", {row.ratio_to_baseline:.3g} x {row.baseline}"
    return f"{row.case}: {row.figure} {_with_unit(row.p50, row.unit)}{against}{ratio}"


def _with_unit(number: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(number)
    # What is counted needs no second word, a share has none.
    return f"{number:.4g} {unit}" if unit not in ("share", "slots") else f"{number:.4g}"
