"""Results of `hotset simulate` as a table for people and as rows for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotset.core.simulator import HalfLifeChoice, Result
from hotset.core.trace import Trace


def to_rows(
    results: Sequence[Result], choices: Sequence[HalfLifeChoice], trace: Trace
) -> dict[str, Any]:
    """One object: what was replayed, `rows` (one per condition), and the best half-lives."""
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
            }
            for result in results
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
    results: Sequence[Result], choices: Sequence[HalfLifeChoice], *, title: str
) -> None:
    """Prints a table of hit rates to stdout: a row per policy, a column per number of slots."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    slots = list(dict.fromkeys(result.condition.slots for result in results))
    table = Table(show_edge=False)
    table.add_column("hit rate at slots for")
    for fraction in slots:
        table.add_column(f"{fraction:.4g}", justify="right", no_wrap=True)
    for label in dict.fromkeys(result.condition.label for result in results):
        rates = {r.condition.slots: r.hit_rate for r in results if r.condition.label == label}
        cells = (f"{rates[fraction]:.3f}" if fraction in rates else "" for fraction in slots)
        table.add_row(Text(label), *cells)
    console = Console()
    console.print(Text(title, style="bold"))
    console.print(table)
    for choice in choices:
        console.print(
            f"best half-life at {choice.slots:.4g}: {choice.half_life:g} steps "
            f"(95%: {choice.low:g} to {choice.high:g}), hit rate {choice.hit_rate:.3f} "
            f"(95%: {choice.hit_rate_low:.3f} to {choice.hit_rate_high:.3f})",
            highlight=False,
        )


def _finite(number: float | None) -> float | str | None:
    """JSON has no infinity; the text can be given back to `--half-life`."""
    return "inf" if number == float("inf") else number
