"""Decode steps of an engine under replayed routing: made, launched as the engine does, and timed.

Knows times, hits and misses; not what they are compared with. One engine has a slot for every
expert; how many of them experts own at the start is what a case changes, and since a fill only ever
swaps owners, that is the same as having so many slots. The KV cache is filled with random numbers
to the wanted length, not prefilled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hotset.bench.replay import Replay, ReplayedRouting
from hotset.bench.timing import time_ms
from hotset.core.placement import Matches, Placement
from hotset.core.policy import FloatArray, Policy
from hotset.kernels.attention import AttentionKernels
from hotset.models.seam import ExpertsFunction
from hotset.runtime.decode import MOST_IN_FLIGHT, DecodeStep
from hotset.runtime.engine import Engine
from hotset.runtime.fills import FillPlanner
from hotset.runtime.moe import MoERunner
from hotset.runtime.sampling import REPORT_WIDTH

# Steps before those that count: the clock of the card and the policy settle.
SETTLE_STEPS = 32


@dataclass(frozen=True)
class Measured:
    """Steps of one kind.

    Attributes:
        times: milliseconds of each step that counts.
        hits_L, misses_L: mean distinct experts of a step with and without a slot, [L].
        filled: share of the misses that were given a slot.
    """

    times: list[float]
    hits_L: FloatArray
    misses_L: FloatArray
    filled: float

    @property
    def hit_rate(self) -> float:
        return float(self.hits_L.sum() / (self.hits_L.sum() + self.misses_L.sum()))


class DecodeRun:
    """Steps of one batch size.

    Args:
        engine: with a slot for every expert and a KV pool of `size` rows or more; its placement is
            changed.
        replay: what is routed, of `size` rows.
        context: tokens in the cache of each row at the first step that counts.
        num_steps: steps that count.
    """

    def __init__(self, engine: Engine, replay: Replay, *, context: int, num_steps: int) -> None:
        assert engine.decoding is not None, engine.geometry.attention_reason
        self._engine, self._decoding, self._replay = engine, engine.decoding, replay
        self._pool = engine.decoding.pool
        self.size: int = replay.ids_TBLK.shape[1]
        self._routing = ReplayedRouting(replay, device=engine.device)
        self._context, self._num_steps = context, num_steps
        self._plain: DecodeStep | None = None
        self._filling: DecodeStep | None = None
        for pair in self._pool.pools.values():
            for tensor in pair:
                tensor.normal_()
        for index in self._pool.indices.values():
            index.keys.normal_()
            if index.recent is not None:
                index.recent.normal_()

    def measure(self, placement: Placement, policy: Policy) -> Measured:
        """Steps that begin with these owners of slots, filled as the policy wishes.

        As the engine does it: the next step is queued before the last one is taken in. Times are
        of the wall clock, from one step's end to the next one's.
        """
        step, rows = self._begin(placement, policy, self._replay)
        steps, total, launched = self._engine.steps, SETTLE_STEPS + self._num_steps, 0
        ends, found = [], []
        for count in range(total):
            with steps.exclusive():
                while launched < min(total, count + MOST_IN_FLIGHT):
                    step.launch()
                    launched += 1
                found.append(self._account(step))
            ends.append(time.perf_counter())
        self._end(rows)
        times = np.diff(ends)[SETTLE_STEPS - 1 :] * 1e3
        return _measured(times.tolist(), found[SETTLE_STEPS:])

    def measure_alone(self, placement: Placement, policy: Policy, replay: Replay) -> Measured:
        """The same with each step waited for, and timed on the device: wishes are then never a
        step old.

        Args:
            replay: what is routed instead, of as many steps and rows.
        """
        step, rows = self._begin(placement, policy, replay)
        times, found = [], []
        for _ in range(SETTLE_STEPS + self._num_steps):
            with self._engine.steps.exclusive():
                times += time_ms(step.launch, device=self._engine.device, repeats=1, warmup=0)
                found.append(self._account(step))
        self._end(rows)
        return _measured(times[SETTLE_STEPS:], found[SETTLE_STEPS:])

    def time_without_experts(self, context: int) -> list[float]:
        """Milliseconds of steps without experts and sampling, that many tokens in each cache."""
        step = self._make(None, runner=_no_experts, sample=_no_sampling)
        rows = self._open(context)
        step.start(rows, [1] * self.size)
        times = time_ms(step.replay, device=self._engine.device, repeats=20, warmup=3)
        self._end(rows)
        return times

    def has_room(self, context: int) -> bool:
        """Whether each row of the pool may be so long, with some tokens to decode."""
        most = context + 8
        return most <= self._pool.context_tokens and self._pool.has_room(most)

    def _begin(
        self, placement: Placement, policy: Policy, replay: Replay
    ) -> tuple[DecodeStep, list[int]]:
        engine = self._engine
        engine.place(placement)
        self._routing.restart(replay)
        step = self._filling_step(policy) if policy.moves else self._plain_step()
        rows = self._open(self._context)
        step.start(rows, [1] * self.size)
        return step, rows

    def _plain_step(self) -> DecodeStep:
        self._plain = self._plain or self._make(None)
        return self._plain

    def _filling_step(self, policy: Policy) -> DecodeStep:
        """One captured step for all policies: only who wishes changes."""
        if self._filling is None:
            self._filling = self._make(FillPlanner(policy, self._engine.store))
        assert self._filling.fills is not None
        self._filling.fills.follow(policy)
        return self._filling

    def _make(
        self,
        fills: FillPlanner | None,
        *,
        runner: ExpertsFunction | None = None,
        sample: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> DecodeStep:
        engine = self._engine
        num_layers = len(engine.geometry.layers)
        return DecodeStep(
            engine.model,
            engine.geometry.layers,
            [runner or self._runner(layer, fills) for layer in range(num_layers)],
            pool=self._pool,
            size=self.size,
            sample=sample or engine.sampler,
            attention=AttentionKernels(engine.kernels.name),
            options=self._decoding.options,
            log=engine.steps.log,
            fills=fills,
            before=self._routing.advance,
            route=self._routing.ids,
        )

    def _runner(self, layer: int, fills: FillPlanner | None) -> MoERunner:
        engine = self._engine
        return MoERunner(
            layer,
            engine.experts_module(layer),
            store=engine.store,
            kernels=engine.kernels,
            log=engine.steps.log,
            fills=fills.layers[layer] if fills else None,
        )

    def _account(self, step: DecodeStep) -> Matches:
        ids_LN = step.finish().ids_LN
        if step.fills is not None:
            return step.fills.end_step(ids_LN)
        return self._engine.steps.hits(ids_LN)

    def _open(self, context: int) -> list[int]:
        rows = [self._pool.open() for _ in range(self.size)]
        for row in rows:
            self._pool.reserve(row, context)
            self._pool.grow(row, context)
        return rows

    def _end(self, rows: list[int]) -> None:
        for row in rows:
            self._pool.close(row)


def _measured(times: list[float], found: list[Matches]) -> Measured:
    used_TL = np.array([np.count_nonzero(one.routed_LN, axis=1) for one in found])
    hits_TL = np.array([np.count_nonzero(one.hit_LN, axis=1) for one in found])
    num_filled = sum(len(one.expert) for one in found)
    num_misses = int((used_TL - hits_TL).sum())
    return Measured(
        times=times,
        hits_L=hits_TL.mean(axis=0),
        misses_L=(used_TL - hits_TL).mean(axis=0),
        filled=num_filled / num_misses if num_misses else 0.0,
    )


def _no_experts(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    return x_TH


def _no_sampling(logits_BV: torch.Tensor, rows_B: torch.Tensor) -> torch.Tensor:
    return logits_BV.new_ones(len(logits_BV), REPORT_WIDTH, dtype=torch.int64)
