"""The hit rates of the design's policy table, as rows.

    OMP_NUM_THREADS=1 python benchmarks/policy_table.py TRACES benchmarks/results.jsonl

TRACES is a folder with gpt-oss-20b.npz (and .json) and moe-54m.npz. `hotset simulate FILE --slots
0.25 --domain chat --half-life 64` prints the same numbers. The speed of light is Belady's bound,
the baseline the static set of a profile. Hit rates do not depend on the machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hotset.bench.rows import Row, append
from hotset.core.profile import Profile
from hotset.core.simulator import Condition, Result, simulate
from hotset.core.trace import Trace, load_trace

POLICIES = (
    *("static-uniform", "static-global", "lru", "half-life", "forecast"),
    *("hindsight-static", "belady"),
)


def main() -> None:
    traces, rows = Path(sys.argv[1]), Path(sys.argv[2])
    small = load_trace(traces / "moe-54m.npz")
    for domain in ("code_python", "en_prose", "ja", "chat"):
        append(table(small, slots=(0.25,), half_life=64.0, domain=domain), rows)
    large = load_trace(traces / "gpt-oss-20b.npz")
    append(table(large, slots=(0.125, 0.25, 0.5), half_life=16.0), rows)


def table(
    trace: Trace, *, slots: tuple[float, ...], half_life: float, domain: str | None = None
) -> list[Row]:
    """Replays the even sequences of a domain; the profile is from the odd ones of all domains."""
    profile = Profile.from_trace(trace.select(parity="odd"), with_forecast=True)
    even = trace.select(parity="even", domains=(domain,) if domain else ())
    conditions = [
        Condition(policy, fraction, half_life if policy == "half-life" else None)
        for fraction in slots
        for policy in POLICIES
    ]
    results = simulate(even, conditions, prior_LE=profile.prior, forecast=profile.forecast)
    rates = {(r.condition.policy, r.condition.slots): r.hit_rate for r in results}
    rows = []
    for result in results:
        fraction = result.condition.slots
        rows.append(
            row(
                result,
                model=even.info.model.split("/")[-1],
                domain=domain,
                best=rates["belady", fraction],
                static=rates["static-uniform", fraction],
            )
        )
        sys.stdout.write(f"{rows[-1].case}: {rows[-1].p50}\n")
    return rows


def row(result: Result, *, model: str, domain: str | None, best: float, static: float) -> Row:
    condition, rate = result.condition, result.hit_rate
    case = f"{model} {domain}" if domain else model
    return Row(
        bench="policy_table",
        case=f"{case}, {condition.slots:.4g} slots, {condition.label}",
        figure="hit rate",
        unit="share",
        p20=round(rate, 4),
        p50=round(rate, 4),
        p80=round(rate, 4),
        repeats=1,
        sol=round(best, 4),
        ratio_to_sol=round(rate / best, 4),
        baseline="static-uniform",
        ratio_to_baseline=round(rate / static, 4),
        command="python benchmarks/policy_table.py TRACES benchmarks/results.jsonl",
    )


if __name__ == "__main__":
    main()
