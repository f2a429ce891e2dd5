"""Predicted speed as tables: of one plan, and of many against the context. Knows words only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from hotset.cli.text import amount
from hotset.core.plan import MemoryPlan
from hotset.core.speed import Speed


def speed_table(speed: Speed) -> Table:
    """What is predicted, and the terms that it is the sum of."""
    work, step, prompt = speed.workload, speed.step, speed.prompt
    table = Table(title="\npredicted speed", title_justify="left", show_edge=False)
    table.add_column("figure")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("why")
    add_row(
        table,
        "decode",
        f"{speed.tokens_per_second:.1f} tokens/s",
        f"{step.total_ms:.2f} ms a step{_rows(speed)}: experts {step.experts_ms:.2f}, resident "
        f"weights {step.resident_ms:.2f}, KV cache {step.kv_ms:.2f}, layers {step.layers_ms:.2f}",
    )
    add_row(table, "hit rate", f"{speed.hit_rate:.3f}", "of the experts of a decode step")
    add_row(
        table,
        "first token",
        f"{speed.first_token_seconds:.2f} s",
        f"{work.prompt_tokens} tokens in {amount(prompt.num_passes, 'forward')}: experts "
        f"{prompt.experts_ms:.0f} ms, attention {prompt.attention_ms:.0f}, the rest "
        f"{prompt.rest_ms:.0f}, waiting {prompt.waiting_ms:.0f} for the link, which is busy for "
        f"{prompt.stream_ms:.0f}",
    )
    if speed.rates_source:
        add_row(table, "rates", "", speed.rates_source)
    if speed.load_seconds is not None:
        add_row(table, "load", f"{speed.load_seconds:.0f} s", "all weights from disk once")
    if speed.slot_share == 1:
        return table
    if speed.half_life is not None:
        add_row(table, "half-life", f"{speed.half_life:g}", speed.half_life_note)
    if speed.cpu_break_even is not None:
        add_row(table, "break-even", f"{speed.cpu_break_even:.3f}", _break_even(speed))
    return table


def _rows(speed: Speed) -> str:
    return "" if speed.num_rows == 1 else f" of {speed.num_rows} rows"


def _break_even(speed: Speed) -> str:
    what = "hit rate below which an engine that computes on the CPU what has no slot is faster"
    assert speed.cpu_break_even is not None
    if speed.hit_rate < speed.cpu_break_even:
        return f"{what}: here it would be"
    return what


def assumptions(speed: Speed) -> list[Text]:
    """Each as a line."""
    return [Text(f"assumed: {text}") for text in speed.assumptions]


_FIGURES = (
    ("slot_share", "{:.1%}"),
    ("hit_rate", "{:.3f}"),
    ("tokens_per_second", "{:.1f}"),
    ("first_token_seconds", "{:.2f} s"),
)


def _figure(value: float | None, text: str) -> str:
    return "n/a" if value is None else text.format(value)


def sweep_table(plans: Sequence[MemoryPlan]) -> Table:
    """Slots and speed against the context; what does not fit has no figures."""
    table = Table(title="\nslots against context", title_justify="left", show_edge=False)
    for name in ("context", "slots", "chunk", "of all", "hit rate", "tokens/s", "first token"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sweep_rows(plans):
        if not row["fits"]:
            add_row(table, str(row["context_tokens"]), "does not fit")
            continue
        sizes = (row["context_tokens"], row["num_slots"], row["prefill_chunk"])
        add_row(table, *map(str, sizes), *(_figure(row[key], text) for key, text in _FIGURES))
    return table


def sweep_rows(plans: Sequence[MemoryPlan]) -> list[dict[str, Any]]:
    """The same for programs; sizes and speed are `None` where they do not apply."""
    return [
        {
            "context_tokens": plan.context_tokens,
            "fits": plan.fits,
            "num_slots": plan.num_slots if plan.fits else None,
            "slot_share": plan.speed and plan.speed.slot_share,
            "prefill_chunk": plan.prefill_chunk if plan.fits else None,
            "hit_rate": plan.speed and plan.speed.hit_rate,
            "tokens_per_second": plan.speed and plan.speed.tokens_per_second,
            "first_token_seconds": plan.speed and plan.speed.first_token_seconds,
        }
        for plan in plans
    ]


def add_row(table: Table, *cells: str) -> None:
    """Adds cells as they are: in a plain string `[...]` would be markup."""
    table.add_row(*(Text(cell) for cell in cells))
