"""A memory plan as tables for people. Knows how a plan reads, not how it came about."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotset.cli.speed_table import add_row, assumptions, speed_table
from hotset.core.plan import Choice, MemoryPlan, Side
from hotset.core.units import format_bytes


def plan_table(plan: MemoryPlan, *, title: str) -> RenderableType:
    """Both sides, the choices, warnings and the verdict, ready for `rich`'s `Console.print`."""
    parts: list[RenderableType] = [
        Text(title, style="bold"),
        side_table("\ndevice memory", plan.device),
        side_table("\nhost memory", plan.host),
        choice_table(plan.choices),
    ]
    if plan.speed is not None:
        parts += [speed_table(plan.speed), *assumptions(plan.speed)]
    parts.append(Text())
    parts += [Text(f"warning: {warning}") for warning in plan.warnings]
    parts.append(Text("fits" if plan.fits else "does not fit", style="bold"))
    return Group(*parts)


def side_table(name: str, side: Side) -> Table:
    """Every line of one side; those that are not charged stand below the total."""
    table = Table(title=name, title_justify="left", show_edge=False)
    table.add_column("line")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("why")
    for line in side.lines:
        if line.charged:
            add_row(table, line.name, format_bytes(line.num_bytes), line.note)
    table.add_section()
    add_row(table, "total", format_bytes(side.total_bytes), "")
    budget = "none" if side.budget_bytes is None else format_bytes(side.budget_bytes)
    add_row(table, "budget", budget, side.budget_note)
    table.add_section()
    for line in side.lines:
        if not line.charged:
            add_row(table, line.name, format_bytes(line.num_bytes), line.note)
    return table


def choice_table(choices: tuple[Choice, ...]) -> Table:
    """Requested against effective."""
    table = Table(title="\nchoices", title_justify="left", show_edge=False)
    table.add_column("choice")
    table.add_column("requested", justify="right", no_wrap=True)
    table.add_column("effective", justify="right", no_wrap=True)
    table.add_column("why")
    for choice in choices:
        requested = "auto" if choice.requested is None else _amount(choice.requested, choice.unit)
        effective = _amount(choice.effective, choice.unit)
        add_row(table, choice.name, requested, effective, choice.reason)
    return table


def _amount(value: int, unit: str) -> str:
    return format_bytes(value) if unit == "bytes" else str(value)
