"""Profiles of one kind of text on another, and half-lives chosen by simulation, as tables.

    hotset profile make MODEL --text de.txt --text chat.txt ... -o all --trace all.trace
    python benchmarks/profile_table.py all.trace [SLOTS]

Sequences of even number make profiles and choose half-lives, those of odd number are scored, so
that nothing is judged on what it has seen. Prints Markdown.
"""

from __future__ import annotations

import sys

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
    print_scores(seen, held_out, slots)
    print_half_lives(seen, held_out, slots)


def print_scores(seen: Trace, held_out: Trace, slots: float) -> None:
    """A row for each profile, a column for each domain that it is scored on."""
    domains = seen.domains
    say("| profile of | " + " | ".join(domains) + " |")
    say("|---|" + "---|" * len(domains))
    for name in (*domains, "all of them"):
        chosen = domains if name == "all of them" else (name,)
        profile = Profile.from_trace(seen.select(domains=chosen))
        rates = [profile.score(held_out.select(domains=(d,)), slots=slots) for d in domains]
        say(f"| {name} | " + " | ".join(f"{rate:.3f}" for rate in rates) + " |")
    replayed = [replay(held_out.select(domains=(d,)), slots, (64.0,))[0] for d in domains]
    say("| half-life 64 | " + " | ".join(f"{r.hit_rate:.3f}" for r in replayed) + " |")


def print_half_lives(seen: Trace, held_out: Trace, slots: float) -> None:
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


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def replay(trace: Trace, slots: float, half_lives: tuple[float, ...]) -> list[Result]:
    """Policy `half-life` without a profile."""
    return simulate(trace, [Condition(HalfLife.name, slots, value) for value in half_lives])


if __name__ == "__main__":
    main(sys.argv[1:])
