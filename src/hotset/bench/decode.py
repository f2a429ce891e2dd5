"""`bench decode`: the whole decode step of a random model, with routing replayed from a trace.

One engine has a slot for every expert; how many of them experts own at the start is what a case
changes, and since a fill only ever swaps owners, that is the same as having so many slots. The KV
cache is filled with random numbers to the wanted length, not prefilled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hotset.bench.rates import measure_rates
from hotset.bench.replay import Replay, ReplayedRouting
from hotset.bench.rows import Row, Spread
from hotset.bench.timing import time_ms
from hotset.core.costmodel import Rates, decode_step
from hotset.core.placement import Matches, Placement
from hotset.core.policy import HalfLife
from hotset.core.slot_pools import BoolArray
from hotset.kernels.attention import AttentionKernels
from hotset.models.seam import ExpertsFunction
from hotset.runtime.decode import MOST_IN_FLIGHT, DecodeStep
from hotset.runtime.engine import Engine
from hotset.runtime.fills import FillPlanner
from hotset.runtime.moe import MoERunner
from hotset.runtime.sampling import REPORT_WIDTH

# Steps before those that count: the clock of the card and the policy settle.
_SETTLE_STEPS = 32


@dataclass(frozen=True)
class DecodeCase:
    """One measurement.

    Attributes:
        slots: share of the experts of each layer that own a slot.
        policy: `half-life` fills; `static` keeps those that the profile counted most; `random`
            keeps a random set.
    """

    slots: float
    policy: str


class DecodeBench:
    """An engine's decode step under replayed routing.

    Args:
        engine: with a slot for every expert and a KV pool; its placement is changed.
        replay: what is routed.
        profile_LE: uses of each expert in other texts, for `static`.
        shape: its name, for the rows.
        context: tokens in the cache at the first step that counts.
        num_steps: steps that count.
    """

    def __init__(
        self,
        engine: Engine,
        replay: Replay,
        profile_LE: np.ndarray,
        *,
        shape: str,
        context: int,
        num_steps: int,
    ) -> None:
        assert engine.decoding is not None, engine.geometry.attention_reason
        self._engine, self._pool = engine, engine.decoding.pool
        self._options = engine.decoding.options
        self._routing = ReplayedRouting(replay, device=engine.device)
        self._note, self._profile_LE = replay.note, profile_LE
        self._shape, self._context, self._num_steps = shape, context, num_steps
        for pair in self._pool.pools.values():
            for tensor in pair:
                tensor.normal_()

    def run(self, cases: Sequence[DecodeCase]) -> Iterator[Row]:
        """Rates of the machine, then each case."""
        rates = measure_rates(self._engine.store)
        for name in ("link", "copy", "hbm"):
            spread = Spread.of([getattr(rates, f"{name}_gbps")])
            yield Row(bench="rates", case=self._shape, figure=name, unit="GB/s", **vars(spread))
        yield from self._resident_path(rates)
        plain = self._step(fills=None)
        for case in cases:
            if case.policy != HalfLife.name:
                yield from self._measure(case, plain, None, rates)
        del plain
        for case in cases:
            if case.policy == HalfLife.name:
                fills = self._planner(case)
                yield from self._measure(case, self._step(fills=fills), fills, rates)

    def _resident_path(self, rates: Rates) -> Iterator[Row]:
        """The step without experts and sampling, at a few lengths of the cache."""
        step = self._step(fills=None, experts=False)
        geometry = self._engine.geometry
        nothing = [0.0] * len(geometry.layers)
        for context in (1024, 8192, 32768):
            if context + 8 > self._pool.context_tokens:
                continue
            row = self._open(context)
            step.start([row], [1])
            times = time_ms(step.replay, device=self._engine.device, repeats=20, warmup=3)
            self._pool.close(row)
            sol = decode_step(geometry, rates, hits=nothing, misses=nothing, context_tokens=context)
            spread = Spread.of(times)
            yield Row(
                bench="decode",
                case=f"{self._shape}, {context} tokens of context",
                figure="step without experts and sampling",
                unit="ms",
                **vars(spread),
                sol=sol.total_ms,
                ratio_to_sol=sol.total_ms / spread.p50,
            )

    def _planner(self, case: DecodeCase) -> FillPlanner:
        """A planner that has never wished, over the case's residents."""
        engine = self._engine
        engine.place(self._placement(case))
        policy = HalfLife([layer.num_experts for layer in engine.geometry.layers], prior_LE=None)
        return FillPlanner(policy, engine.store)

    def _placement(self, case: DecodeCase) -> Placement:
        pools = self._engine.pools
        rng = np.random.default_rng(0)
        resident_LE: BoolArray = np.zeros((len(pools.num_experts), pools.max_experts), dtype=bool)
        for layer, num_experts in enumerate(pools.num_experts):
            count = round(case.slots * num_experts)
            order = (
                np.argsort(-self._profile_LE[layer], kind="stable")
                if case.policy == "static"
                else rng.permutation(num_experts)
            )
            resident_LE[layer, order[:count]] = True
        return Placement.from_residents(pools, resident_LE)

    def _step(self, *, fills: FillPlanner | None, experts: bool = True) -> DecodeStep:
        engine = self._engine
        assert engine.decoding is not None
        return DecodeStep(
            engine.model,
            engine.geometry.layers,
            [self._runner(layer, fills, experts) for layer in range(len(engine.geometry.layers))],
            pool=self._pool,
            size=1,
            sample=engine.sampler if experts else _no_sampling,
            attention=AttentionKernels(engine.kernels.name),
            options=self._options,
            log=engine.steps.log,
            fills=fills,
            before=self._routing.advance,
            route=self._routing.ids,
        )

    def _runner(self, layer: int, fills: FillPlanner | None, experts: bool) -> ExpertsFunction:
        if not experts:
            return lambda x_TH, ids_TK, weights_TK: x_TH
        engine = self._engine
        return MoERunner(
            layer,
            engine.experts_module(layer),
            store=engine.store,
            kernels=engine.kernels,
            log=engine.steps.log,
            fills=fills.layers[layer] if fills else None,
        )

    def _open(self, context: int) -> int:
        row = self._pool.open()
        self._pool.reserve(row, context)
        self._pool.grow(row, context)
        return row

    def _measure(
        self, case: DecodeCase, step: DecodeStep, fills: FillPlanner | None, rates: Rates
    ) -> Iterator[Row]:
        if fills is None:
            self._engine.place(self._placement(case))
        self._routing.restart()
        row = self._open(self._context)
        step.start([row], [1])
        times, used = self._loop(step, fills)
        self._pool.close(row)
        geometry = self._engine.geometry
        hits, misses = (part.mean(axis=0) for part in used)
        sol = decode_step(
            geometry, rates, hits=hits, misses=misses, context_tokens=self._context
        ).total_ms
        spread = Spread.of(times)
        name = f"{self._shape}, {case.slots:.0%} slots, {case.policy}, {self._context} context"
        link = sum(m * x.expert.record_bytes for m, x in zip(misses, geometry.layers, strict=True))
        yield Row(
            bench="decode",
            case=name,
            figure="whole step",
            unit="ms",
            **vars(spread),
            sol=sol,
            ratio_to_sol=sol / spread.p50,
        )
        for figure, unit, value in (
            ("decode", "tokens/s", 1e3 / float(np.mean(times))),
            ("hit rate", "share", float(hits.sum() / (hits.sum() + misses.sum()))),
            ("link bytes per token", "bytes", float(link)),
            ("link rate over the whole step", "GB/s", float(link) / float(np.mean(times)) / 1e6),
        ):
            yield Row(
                bench="decode", case=name, figure=figure, unit=unit, **vars(Spread.of([value]))
            )

    def _loop(
        self, step: DecodeStep, fills: FillPlanner | None
    ) -> tuple[list[float], tuple[np.ndarray, np.ndarray]]:
        """Wall clock of each step in milliseconds, and hits and misses of each, [T, L].

        As the engine does it: the next step is queued before the last one is taken in.
        """
        steps, total = self._engine.steps, _SETTLE_STEPS + self._num_steps
        hits, misses, ends = [], [], []
        launched = 0
        for count in range(total):
            with steps.exclusive():
                while launched < min(total, count + MOST_IN_FLIGHT):
                    step.launch()
                    launched += 1
                matches = self._account(step.finish().ids_LN, fills)
            ends.append(time.perf_counter())
            used_L = np.count_nonzero(matches.routed_LN, axis=1)
            hits_L = np.count_nonzero(matches.hit_LN, axis=1)
            hits.append(hits_L)
            misses.append(used_L - hits_L)
        times = np.diff(ends)[_SETTLE_STEPS - 1 :] * 1e3
        counted = slice(_SETTLE_STEPS, None)
        return times.tolist(), (np.array(hits)[counted], np.array(misses)[counted])

    def _account(self, ids_LN: np.ndarray, fills: FillPlanner | None) -> Matches:
        if fills is not None:
            return fills.end_step(ids_LN)
        return self._engine.steps.hits(ids_LN)


def _no_sampling(logits_BV: torch.Tensor, rows_B: torch.Tensor) -> torch.Tensor:
    return logits_BV.new_ones(len(logits_BV), REPORT_WIDTH, dtype=torch.int64)
