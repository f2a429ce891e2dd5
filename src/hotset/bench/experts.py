"""`bench experts`: the expert kernels alone against the speed of light of link and HBM.

All layers of a shape run once for one token (decode: expert outputs and combine, one CUDA graph)
with a chosen share of the routed experts in slots. Ids are drawn at random for each layer, and
several sets of them take turns, so that no cache holds what is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hotset.bench.rates import measure_rates
from hotset.bench.rows import Row, Spread
from hotset.bench.timing import capture, time_ms
from hotset.core.costmodel import Rates
from hotset.core.geometry import MoELayer
from hotset.core.placement import Placement
from hotset.core.policy import HalfLife
from hotset.experts.store import ExpertStore
from hotset.kernels.dispatch import Kernels
from hotset.runtime.fills import FillPlanner

# Sets of routed ids that take turns within one captured run.
NUM_SETS = 3


@dataclass(frozen=True)
class ExpertsCase:
    """One measurement.

    Attributes:
        hits: share of the routed experts that have a slot.
        num_tokens: tokens of the step.
        match: run the match rule before and the retargeting behind them too, as a step does that
            may fill slots. Nothing is wished for, so nothing is filled.
    """

    hits: float
    num_tokens: int = 1
    match: bool = False


def bench_experts(
    store: ExpertStore,
    kernels: Kernels,
    cases: Sequence[ExpertsCase],
    *,
    shape: str,
    repeats: int = 9,
) -> Iterator[Row]:
    """Measures the machine's rates, then each case.

    Args:
        store: a filled store with slots for half of the experts of each layer; its placement is
            changed.
        kernels: what to measure.
        cases: what to route.
        shape: its name, for the rows.
    """
    rates = measure_rates(store)
    for name in ("link", "copy", "hbm"):
        spread = Spread.of([getattr(rates, f"{name}_gbps")])
        yield Row(bench="rates", case=shape, figure=name, unit="GB/s", **vars(spread))
    rng = np.random.default_rng(1)
    residents = [rng.permutation(layer.num_experts) for layer in store.layers]
    store.place(_half_resident(store, residents))
    for case in cases:
        sets = [
            [
                _route(layer, index, case, order, rng)
                for index, (layer, order) in enumerate(zip(store.layers, residents, strict=True))
            ]
            for _ in range(NUM_SETS)
        ]
        times = _time(store, kernels, case, sets, repeats)
        sol = _speed_of_light_ms(store, sets, rates)
        spread = Spread.of(times)
        yield Row(
            bench="experts",
            case=f"{shape}, {case.num_tokens} token, {case.hits:.0%} hits, {kernels.name}"
            + (", match" if case.match else ""),
            figure="expert kernels, all layers",
            unit="ms",
            **vars(spread),
            sol=sol,
            ratio_to_sol=sol / spread.p50,
        )


def half(layer: MoELayer) -> int:
    """Experts of a layer that this benchmark makes resident."""
    return layer.num_experts // 2


def _half_resident(store: ExpertStore, orders: Sequence[np.ndarray]) -> Placement:
    pools = store.placement.pools
    resident_LE = np.zeros((len(orders), pools.max_experts), dtype=np.bool_)
    for index, (layer, order) in enumerate(zip(store.layers, orders, strict=True)):
        resident_LE[index, order[: half(layer)]] = True
    return Placement.from_residents(pools, resident_LE)


def _route(
    layer: MoELayer, index: int, case: ExpertsCase, order: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Ids [T, K] of which the wanted share is resident: whole experts in a layer, exactly so many
    in all layers together, up to one."""
    resident, others = order[: half(layer)], order[half(layer) :]
    before, after = (math.floor(case.hits * layer.top_k * n + 0.5) for n in (index, index + 1))
    num_hits = after - before
    rows = [
        np.concatenate(
            [
                rng.choice(resident, num_hits, replace=False),
                rng.choice(others, layer.top_k - num_hits, replace=False),
            ]
        )
        for _ in range(case.num_tokens)
    ]
    return np.stack([rng.permutation(row) for row in rows])


def _time(
    store: ExpertStore,
    kernels: Kernels,
    case: ExpertsCase,
    sets: Sequence[Sequence[np.ndarray]],
    repeats: int,
) -> list[float]:
    """Milliseconds of one pass over all layers, several sets of ids in one captured run."""
    device = store.device
    first = store.layers[0]
    dtype = getattr(torch, first.expert.dtype)
    x_TH = torch.randn(case.num_tokens, first.expert.hidden, device=device).to(dtype)
    weights_TK = torch.rand(case.num_tokens, first.top_k, device=device).to(dtype)
    ids = [[torch.from_numpy(ids_TK).to(device) for ids_TK in one] for one in sets]
    num_experts = [layer.num_experts for layer in store.layers]
    planner = FillPlanner(HalfLife(num_experts), store) if case.match else None

    def run() -> None:
        for one in ids:
            for index, layer in enumerate(store.layers):
                matched = planner.layers[index] if planner else None
                if matched is not None:
                    kernels.match(one[index], matched)
                y_TKH = kernels.expert_outputs(
                    x_TH,
                    one[index],
                    store.table.row(index),
                    layer.expert,
                    fill_E=matched.fill_E if matched else None,
                    behind_match=matched is not None,
                )
                kernels.combine(y_TKH, weights_TK, dtype, matched=matched, behind_experts=True)

    replay = capture(run, device=device)
    return [t / len(sets) for t in time_ms(replay, device=device, repeats=repeats)]


def _speed_of_light_ms(
    store: ExpertStore, sets: Sequence[Sequence[np.ndarray]], rates: Rates
) -> float:
    """Mean over the sets: for each layer the longer of link and HBM time, summed over layers."""
    total = 0.0
    for one in sets:
        for index, layer in enumerate(store.layers):
            used = np.unique(one[index])
            num_hits = int(store.placement.resident[index, used].sum())
            link = (len(used) - num_hits) * layer.expert.record_bytes / rates.link_gbps
            hbm = num_hits * layer.expert.record_bytes / rates.hbm_gbps
            total += max(link, hbm) / 1e6
    return total / len(sets)
