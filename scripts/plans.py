"""Writes docs/guides/plans.md: plans of all published shapes for two machines, from configs alone.

    python scripts/plans.py

Takes a few minutes, needs no GPU and no network. What it prints is predicted, and the page says
from what.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from hotset.bench.shapes import shape_config, shape_names
from hotset.core.config import EngineConfig
from hotset.core.errors import CheckpointError
from hotset.core.formats import int4
from hotset.core.geometry import ModelGeometry
from hotset.core.machine import MachineDescription
from hotset.core.units import GIB
from hotset.models.geometry import build_meta
from hotset.models.quantised import with_weights
from hotset.runtime.planning import plan_engine

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "plans.md"
MACHINES = ("rtx-4090", "rtx-pro-6000")

_HEAD = """# Plans for published models

Made by `python scripts/plans.py`, without a GPU, from each model's config alone, as `hotset plan
FOLDER --machine NAME` does for a folder with a config. `experts` is what the routed experts take,
`resident` all else, in GiB: in BF16, and with the experts in INT4 with a BF16 scale for 32 weights.
A cell has slots, share of all experts, predicted tokens per
second of one row in the middle of an answer of 512 tokens, and seconds until the first token of a
prompt of 4,096; or the least host memory that would do, every slot then its expert's only place.
Context, chunk and staging ring are what the planner picks.

Nothing here was measured: rates of these two machines are mostly estimated or from datasheets
(`src/hotset/data/machines`), and the hit rate is the mean of three other models. Vision and audio
towers and layers for multi-token prediction are left out, as the engine leaves them out.

| model | experts | resident | {machines} |
|---|---:|---:|{rule}|
"""


def main() -> None:
    described = [MachineDescription.load(name) for name in MACHINES]
    rows = [row for name in shape_names() if name != "tiny" for row in rows_of(name, described)]
    machines = " | ".join(description.name for description in described)
    head = _HEAD.format(machines=machines, rule="---|" * (len(described) - 1) + "---")
    PAGE.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


def rows_of(name: str, machines: list[MachineDescription]) -> Iterator[str]:
    """The rows of one shape."""
    sys.stderr.write(f"{name}\n")
    try:
        geometry = build_meta(shape_config(name)).geometry
    except CheckpointError as error:
        yield f"| {name} | | | {error.message} | |"
        return
    in_int4 = with_weights(geometry, int4("bfloat16", group=32))
    for label, model in ((name, geometry), (f"{name}, INT4", in_int4)):
        cells = " | ".join(cell(model, name, machine) for machine in machines)
        sizes = f"{model.expert_bytes / GIB:.1f} | {model.resident_bytes / GIB:.1f}"
        yield f"| {label} | {sizes} | {cells} |"


def cell(geometry: ModelGeometry, name: str, machine: MachineDescription) -> str:
    """One plan in a few words."""
    _, plan = plan_engine(geometry, EngineConfig(model=name), description=machine)
    if plan.speed is not None:
        speed = plan.speed
        share = f"{plan.num_slots} slots ({speed.slot_share:.0%})"
        return f"{share}, {speed.tokens_per_second:.1f}/s, {speed.first_token_seconds:.1f} s"
    return "does not fit: " + ", ".join(
        f"`{problem.flag}` {problem.need / GIB:.0f} GiB" for problem in plan.problems
    )


if __name__ == "__main__":
    main()
