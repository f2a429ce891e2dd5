"""Results of `hotset simulate` as a table for people and as rows for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from hotset.cli.outputs import table_console
from hotset.core.half_life import HalfLifeChoice
from hotset.core.simulator import Result
from hotset.core.trace import Trace

MAX_COLUMNS = 6
"""Numbers of slots side by side, so that a table fits 80 columns."""


def to_rows(
    results: Sequence[Result],
    choices: Sequence[HalfLifeChoice],
    trace: Trace,
    speeds: Sequence[float] | None = None,
) -> dict[str, Any]:
    """One object: what was replayed, `rows` (one per condition), and the best half-lives.

    Args:
        speeds: predicted tokens/s of each result; without them rows have none.
    """
    best = {(choice.slots, choice.half_life) for choice in choices}
    return {
        "model": trace.info.model,
        "layers": trace.num_layers,
        "experts": trace.max_experts,
        "sequences": len(trace.sequences),
        "tokens": trace.num_tokens,
        "rows": [
            {
                "policy": result.condition.policy,
                "half_life": _finite(result.condition.half_life),
                "prior_weight": result.condition.prior_weight,
                "slots": result.condition.slots,
                "hit_rate": result.hit_rate,
                "best": (result.condition.slots, result.condition.half_life) in best,
                **({} if speeds is None else {"tokens_per_second": speeds[index]}),
            }
            for index, result in enumerate(results)
        ],
        "best_half_life": [
            {
                "slots": choice.slots,
                "half_life": _finite(choice.half_life),
                "half_life_95": [_finite(choice.low), _finite(choice.high)],
                "hit_rate": choice.hit_rate,
                "hit_rate_95": [choice.hit_rate_low, choice.hit_rate_high],
                "share_of_resamples": choice.share,
            }
            for choice in choices
        ],
    }


def print_results(
    results: Sequence[Result],
    choices: Sequence[HalfLifeChoice],
    *,
    title: str,
    speeds: Sequence[float] | None = None,
) -> None:
    """Prints hit rates to stdout: a row per policy, a column per number of slots. Predicted
    tokens/s, where there are any, in a table of the same form."""
    from rich.text import Text

    console = table_console()
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print("\nhit rate by share of experts with a slot")
    slots = list(dict.fromkeys(result.condition.slots for result in results))
    rates = [f"{result.hit_rate:.3f}" for result in results]
    for first in range(0, len(slots), MAX_COLUMNS):
        console.print(_table(results, rates, slots[first : first + MAX_COLUMNS]))
        console.print()
    if speeds is not None:
        console.print("predicted tokens/s")
        said = [f"{speed:.1f}" for speed in speeds]
        for first in range(0, len(slots), MAX_COLUMNS):
            console.print(_table(results, said, slots[first : first + MAX_COLUMNS]))
            console.print()
    if choices:
        console.print("best half-life, steps, with 95% intervals", highlight=False)
        console.print(_choice_table(choices))


def _table(results: Sequence[Result], texts: Sequence[str], slots: Sequence[float]) -> Table:
    """A figure of each result, by policy and slots."""
    table = Table(show_edge=False)
    table.add_column("policy", no_wrap=True)
    for fraction in slots:
        table.add_column(f"{fraction:.4g}", justify="right", no_wrap=True)
    cells = {
        (result.condition.label, result.condition.slots): text
        for result, text in zip(results, texts, strict=True)
    }
    for label in dict.fromkeys(result.condition.label for result in results):
        table.add_row(label, *(cells.get((label, fraction), "") for fraction in slots))
    return table


def _choice_table(choices: Sequence[HalfLifeChoice]) -> Table:
    table = Table(show_edge=False)
    for name in ("slots", "half-life", "interval", "hit rate", "interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for choice in choices:
        table.add_row(
            f"{choice.slots:.4g}",
            f"{choice.half_life:g}",
            f"{choice.low:g} to {choice.high:g}",
            f"{choice.hit_rate:.3f}",
            f"{choice.hit_rate_low:.3f} to {choice.hit_rate_high:.3f}",
        )
    return table


def _finite(number: float | None) -> float | str | None:
    """JSON has no infinity; the text can be given back to `--half-life`."""
    return "inf" if number == float("inf") else number
