"""Profiles of one kind of text on another, and half-lives chosen by simulation, as tables.

    hotset profile make MODEL --text de.txt --text chat.txt ... -o all --trace all.trace
    python benchmarks/profile_table.py all.trace [SLOTS [benchmarks/results.jsonl]]

Sequences of even number make profiles and choose half-lives, those of odd number are scored, so
that nothing is judged on what it has seen. Prints Markdown, and adds rows to a file that is named.
Hit rates do not depend on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from hotset.bench.rows import Row, Spread, append
from hotset.core.half_life import best_half_life
from hotset.core.policy import HalfLife
from hotset.core.profile import Profile
from hotset.core.simulator import Condition, Result, simulate
from hotset.core.trace import Trace, load_trace

HALF_LIVES = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


def main(args: list[str]) -> None:
    """Prints both tables for a trace of several domains."""
    trace, slots = load_trace(args[0]), float(args[1]) if args[1:] else 0.25
    seen, held_out = trace.select(parity="even"), trace.select(parity="odd")
    model = (trace.info.model or Path(args[0]).stem).split("/")[-1]
    rows = [*scores(seen, held_out, slots, model), *half_lives(seen, held_out, slots, model)]
    if args[2:]:
        append(rows, Path(args[2]))


def scores(seen: Trace, held_out: Trace, slots: float, model: str) -> Iterator[Row]:
    """A line for each profile, a column for each domain that it is scored on. Rows are of its own
    domain and of all others, percentiles over them."""
    domains = seen.domains
    say("| profile of | " + " | ".join(domains) + " |")
    say("|---|" + "---|" * len(domains))
    texts = {domain: held_out.select(domains=(domain,)) for domain in domains}
    for name in (*domains, "all of them"):
        chosen = domains if name == "all of them" else (name,)
        profile = Profile.from_trace(seen.select(domains=chosen))
        rates = {d: profile.score(text, slots=slots) for d, text in texts.items()}
        say(f"| {name} | " + " | ".join(f"{rate:.3f}" for rate in rates.values()) + " |")
        case = f"{model}, {slots:.4g} slots, static set by a profile of {name}"
        own = rates.pop(name, None)
        if own is not None:
            yield row(f"{case}, its own text", "hit rate, held out", [own])
        yield row(f"{case}, other texts", "hit rate, held out", [*rates.values()])
    replayed = {d: replay(text, slots, (64.0,))[0].hit_rate for d, text in texts.items()}
    say("| half-life 64 | " + " | ".join(f"{rate:.3f}" for rate in replayed.values()) + " |")


def half_lives(seen: Trace, held_out: Trace, slots: float, model: str) -> Iterator[Row]:
    """What the choice on seen sequences loses on the others, by domain and for all of them."""
    say("\n| text | chosen | interval | its hit rate, held out | best held out | loss |")
    say("|---|---|---|---|---|---|")
    for name in (*seen.domains, "all of them"):
        domains = () if name == "all of them" else (name,)
        (choice,) = best_half_life(replay(seen.select(domains=domains), slots, HALF_LIVES))
        others = replay(held_out.select(domains=domains), slots, HALF_LIVES)
        rates = {result.condition.half_life: result.hit_rate for result in others}
        best = max(rates, key=lambda half_life: rates[half_life])
        got = rates[choice.half_life]
        say(
            f"| {name} | {choice.half_life:g} | {choice.low:g} to {choice.high:g} | {got:.4f} "
            f"| {rates[best]:.4f} at {best:g} | {rates[best] - got:.4f} |"
        )
        case = f"{model}, {slots:.4g} slots, half-life {choice.half_life:g} chosen on other "
        case += "texts" if name == "all of them" else f"texts of {name}"
        yield row(case, "hit rate, held out", [got], against=(f"half-life {best:g}", rates[best]))


def row(
    case: str, figure: str, rates: list[float], *, against: tuple[str, float] | None = None
) -> Row:
    """One figure; `against` is the best there is."""
    spread = Spread.of([round(rate, 4) for rate in rates])
    return Row(
        bench="profile_table",
        case=case,
        figure=figure,
        unit="share",
        **vars(spread),
        baseline=None if against is None else against[0],
        ratio_to_baseline=None if against is None else round(spread.p50 / against[1], 4),
        command="python benchmarks/profile_table.py TRACE 0.25 benchmarks/results.jsonl",
    )


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def replay(trace: Trace, slots: float, half_lives: tuple[float, ...]) -> list[Result]:
    """Policy `half-life` without a profile."""
    return simulate(trace, [Condition(HalfLife.name, slots, value) for value in half_lives])


if __name__ == "__main__":
    main(sys.argv[1:])
