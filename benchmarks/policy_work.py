"""Times what a policy costs the host per step: match, apply, observe, wishes.

    OMP_NUM_THREADS=1 python benchmarks/policy_work.py benchmarks/results.jsonl

Routing is made up (Dirichlet popularity, 25% of the experts resident); the work does not depend on
it, except for the few experts that change owners. One core, and its time that this process had; of
three rounds the fastest counts, as what else runs on the machine can only slow them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from hotset.bench.rows import Row, Spread, append
from hotset.core.forecast import Forecast
from hotset.core.placement import Placement
from hotset.core.policy import Wishes, make_policy
from hotset.core.slot_pools import SlotPools

SHAPES = ((24, 32, 4), (48, 128, 8), (48, 512, 10))  # layers, experts, top-k
STEPS = 2000
WARM_UP = 200
ROUNDS = 3


def main() -> None:
    rows = []
    for name in ("half-life", "lru", "forecast"):
        for layers, experts, top_k in SHAPES:
            rounds = [
                time_steps(name, layers=layers, experts=experts, top_k=top_k) for _ in range(ROUNDS)
            ]
            micros = min(rounds, key=lambda times: float(np.median(times)))
            case = f"{name}, {layers} layers x {experts} experts, top-{top_k}, batch 1, 25% slots"
            events = [layers / value * 1e6 for value in micros]
            rows += [
                row(case, "policy work per step", "us", micros),
                row(case, "token-layer events of one condition", "1/s", events),
            ]
    for line in rows:
        sys.stdout.write(f"{line.case}: {line.figure} {line.p50:.0f} {line.unit}\n")
    append(rows, Path(sys.argv[1]))


def row(case: str, figure: str, unit: str, values: list[float]) -> Row:
    spread = Spread.of(values)
    return Row(
        bench="policy_work",
        case=case,
        figure=figure,
        unit=unit,
        p20=round(spread.p20, 1),
        p50=round(spread.p50, 1),
        p80=round(spread.p80, 1),
        repeats=spread.repeats,
        command="OMP_NUM_THREADS=1 python benchmarks/policy_work.py benchmarks/results.jsonl",
    )


def time_steps(name: str, *, layers: int, experts: int, top_k: int) -> list[float]:
    """Microseconds of each step."""
    random = np.random.default_rng(0)
    share = random.dirichlet(np.full(experts, 0.3), size=layers)
    policy = make_policy(
        name, num_experts=[experts] * layers, forecast=made_up_forecast(layers, experts)
    )
    pools = SlotPools.uniform([experts] * layers, [experts // 4] * layers)
    placement = Placement.from_residents(pools, policy.initial(pools))
    wishes = policy.wishes(placement, out=Wishes.none(layers, policy.num_victims, experts))
    steps = []
    for _ in range(STEPS):
        noise = random.gumbel(size=(layers, experts)) + np.log(share + 1e-9)
        steps.append(np.argpartition(-noise, top_k, axis=1)[:, :top_k])
    micros = []
    for ids in steps:
        start = time.process_time()
        placement.apply(placement.match_step(ids, wishes.victims_LV, wishes.admit_LE))
        policy.observe(ids)
        policy.wishes(placement, out=wishes)
        micros.append((time.process_time() - start) * 1e6)
    return micros[WARM_UP:]


def made_up_forecast(layers: int, experts: int) -> Forecast:
    """Weights like fitted ones in size: an expert forecasts itself, and others a little."""
    random = np.random.default_rng(1)
    shared = random.normal(0, 0.003, size=(layers, experts, 2, experts)).astype(np.float32)
    shared[:, np.arange(experts), :, np.arange(experts)] += 0.05
    ones = np.ones(layers)
    return Forecast(
        shared_LEF=shared.reshape(layers, experts, -1),
        own_L=0.003 * ones,
        use_L=0.08 * ones,
        constant_LE=np.full((layers, experts), 0.02),
        num_tokens=0,
    )


if __name__ == "__main__":
    main()
