"""`bench decode`: the whole decode step of a random model, with routing replayed from a trace.

In one run, for every batch size: policies side by side under each number of slots, no cache at all,
stock transformers with accelerate's offload, what fills cost, and for one row the step without
experts. Makes rows of what `decode_run` measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hotset.bench.decode_cases import NO_CACHE, DecodeCase, budget_bytes, percent
from hotset.bench.decode_run import DecodeRun, Measured
from hotset.bench.offload import OffloadedDecode, time_offloaded_decode
from hotset.bench.rates import measure_rates, with_known
from hotset.bench.replay import Replay, never_again
from hotset.bench.rows import Row, Spread
from hotset.core.costmodel import decode_step, predict_step
from hotset.core.placement import Placement
from hotset.core.policy import FloatArray, Lru, NoPolicy, StaticUniform, make_policy
from hotset.runtime.engine import Engine

# The figure of a whole step in tokens per second, and who else has it.
SPEED = "decode"
OFFLOAD = "accelerate offload"
_BARE_CONTEXTS = (1024, 8192, 32768)
_OFFLOAD_REPEATS = 5


class DecodeBench:
    """Decode steps of an engine.

    Args:
        engine: with a slot for every expert and a KV pool; its placement is changed.
        replay: what is routed, with rows for the largest batch.
        prior_LE: uses per token of each expert in other texts: what policies know beforehand.
        shape: its name, for the rows.
        context: tokens in the cache of each row at the first step that counts.
        num_steps: steps that count.
    """

    def __init__(
        self,
        engine: Engine,
        replay: Replay,
        prior_LE: FloatArray,
        *,
        shape: str,
        context: int,
        num_steps: int,
    ) -> None:
        self._engine, self._replay, self._prior_LE = engine, replay, prior_LE
        self._shape, self._context, self._num_steps = shape, context, num_steps
        self._num_experts = [layer.num_experts for layer in engine.geometry.layers]
        self._rates = measure_rates(engine.store)
        self._layer_us = 0.0  # of the batch size that runs

    def run(
        self, cases: Sequence[DecodeCase], batches: Sequence[int], *, offload_layers: int
    ) -> Iterator[Row]:
        """Rates of the machine, then for each batch size what the cases are compared with and
        each case. Static sets come first, as others are compared with them.

        Args:
            offload_layers: layers that the comparison with accelerate is cut to; 0 leaves it out.
        """
        for name in ("link", "copy", "hbm"):
            spread = Spread.of([getattr(self._rates, f"{name}_gbps")])
            yield Row(bench="rates", case=self._shape, figure=name, unit="GB/s", **vars(spread))
        offloaded: dict[int, OffloadedDecode] = {}
        if offload_layers:
            offloaded = time_offloaded_decode(
                self._engine,
                batches,
                context_tokens=self._context,
                num_layers=offload_layers,
                repeats=_OFFLOAD_REPEATS,
            )
        ordered = sorted(cases, key=lambda case: case.choice.policy != StaticUniform.name)
        for size in batches:
            replay = self._replay.first_rows(size)
            run = DecodeRun(self._engine, replay, context=self._context, num_steps=self._num_steps)
            if size == 1:
                yield from self._without_experts(run)
                yield from self._fill_cost(run)
            yield from self._batch(run, ordered, offloaded.get(size))

    def _batch(
        self, run: DecodeRun, cases: Sequence[DecodeCase], offloaded: OffloadedDecode | None
    ) -> Iterator[Row]:
        self._layer_us = self._measured_layer_us(run)
        name = self._name(run, "a decoder layer without experts")
        yield self._row(name, "time beyond its bytes", "us", [self._layer_us])
        none = self._measure(run, NO_CACHE)
        static: dict[float, Measured] = {}
        if offloaded is not None:
            for share in sorted({case.slots for case in cases}):
                yield from self._offload_rows(run, share, offloaded.at(share))
        yield from self._rows(run, NO_CACHE, none, none, none, offloaded)
        for case in cases:
            measured = self._measure(run, case)
            if case.choice.policy == StaticUniform.name:
                static[case.slots] = measured
            yield from self._rows(run, case, measured, none, static.get(case.slots), offloaded)

    def _measure(self, run: DecodeRun, case: DecodeCase) -> Measured:
        policy = case.choice.make(self._num_experts, self._prior_LE)
        return run.measure(case.placement(policy, self._engine.pools), policy)

    def _rows(
        self,
        run: DecodeRun,
        case: DecodeCase,
        measured: Measured,
        none: Measured,
        static: Measured | None,
        offloaded: OffloadedDecode | None,
    ) -> Iterator[Row]:
        name = self._name(run, case.words)
        sol, expected = self._speed_of_light_ms(run, measured), self._expected_ms(run, measured)
        speed, link = self._speed(run, measured), self._link_bytes(measured)
        plan, geometry = self._engine.plan, self._engine.geometry
        p50 = Spread.of(measured.times).p50
        yield self._row(
            name,
            "whole step",
            "ms",
            measured.times,
            sol=sol,
            against=("prediction", p50 / expected),
        )
        yield self._row(name, "predicted whole step", "ms", [expected])
        against = ("no cache", speed / self._speed(run, none))
        yield self._row(name, SPEED, "tokens/s", [speed], against=against)
        if offloaded is not None:
            theirs = 1e3 * run.size / offloaded.at(case.slots)
            figure = f"{SPEED}, against {OFFLOAD}"
            yield self._row(name, figure, "tokens/s", [speed], against=(OFFLOAD, speed / theirs))
        yield self._row(name, "hit rate", "share", [measured.hit_rate])
        base = None if static is None else self._link_bytes(static)
        yield self._row(
            name,
            "link bytes per token",
            "bytes",
            [link / run.size],
            against=(StaticUniform.name, link / base) if base and static is not none else None,
        )
        rate = link / float(np.mean(measured.times)) / 1e6
        yield self._row(name, "link rate over the whole step", "GB/s", [rate])
        yield self._row(name, "slots", "bytes", [case.slots * geometry.expert_bytes])
        budget = budget_bytes(case.slots, plan, geometry)
        yield self._row(name, "device memory with them", "bytes", [budget])

    def _offload_rows(self, run: DecodeRun, share: float, step_ms: float) -> Iterator[Row]:
        name = self._name(run, f"{percent(share)} of layers on the device, {OFFLOAD}")
        yield self._row(name, "whole step", "ms", [step_ms])
        yield self._row(name, SPEED, "tokens/s", [1e3 * run.size / step_ms])

    def _without_experts(self, run: DecodeRun) -> Iterator[Row]:
        """The step without experts and sampling, at a few lengths of the cache."""
        for context in filter(run.has_room, _BARE_CONTEXTS):
            yield self._row(
                f"{self._shape}, {context} tokens of context",
                "step without experts and sampling",
                "ms",
                run.time_without_experts(context),
                sol=self._bytes_without_experts_ms(context),
            )

    def _bytes_without_experts_ms(self, context_tokens: int) -> float:
        geometry = self._engine.geometry
        nothing = [0.0] * len(geometry.layers)
        return decode_step(
            geometry, self._rates, hits=nothing, misses=nothing, context_tokens=context_tokens
        ).total_ms

    def _measured_layer_us(self, run: DecodeRun) -> float:
        """What a decoder layer takes beyond its bytes, without experts: families differ in it, so a
        prediction goes by this run's."""
        bare_ms = Spread.of(run.time_without_experts(self._context)).p50
        bytes_ms = self._bytes_without_experts_ms(run.size * self._context)
        return max(0.0, bare_ms - bytes_ms) / self._engine.geometry.num_layers * 1e3

    def _fill_cost(self, run: DecodeRun) -> Iterator[Row]:
        """The same misses with and without being filled: every expert in turn, so that LRU with
        half of them in slots has always just lost the one that comes."""
        pools = self._engine.pools
        replay = never_again(
            self._engine.geometry, num_tokens=len(self._replay.ids_TBLK), num_rows=run.size
        )
        nobody = make_policy(NoPolicy.name, num_experts=self._num_experts)
        off = run.measure_alone(Placement(pools), nobody, replay)
        lru = make_policy(Lru.name, num_experts=self._num_experts)
        halved = np.array(self._num_experts) // 2
        placement = Placement.from_residents(pools, lru.initial(pools, slots_per_layer=halved))
        on = run.measure_alone(placement, lru, replay)
        name = self._name(run, "every expert missing")
        yield self._row(name, "step, fills off", "ms", off.times)
        ratio = Spread.of(on.times).p50 / Spread.of(off.times).p50
        yield self._row(name, "step, fills on", "ms", on.times, against=("fills off", ratio))
        yield self._row(name, "misses that were filled", "share", [on.filled])
        yield self._row(name, "hit rate, fills on", "share", [on.hit_rate])

    def _speed_of_light_ms(self, run: DecodeRun, measured: Measured) -> float:
        return decode_step(
            self._engine.geometry,
            self._rates,
            hits=measured.hits_L.tolist(),
            misses=measured.misses_L.tolist(),
            context_tokens=run.size * self._context,
        ).total_ms

    def _expected_ms(self, run: DecodeRun, measured: Measured) -> float:
        """The step as `core.costmodel` predicts it from the hits that it had, the rates and the
        layer time of this run, and what is known beforehand of the experts' kernels."""
        used_L = measured.hits_L + measured.misses_L
        rates = with_known(self._rates, self._engine.machine)
        cost = predict_step(
            self._engine.geometry,
            # That of the batch that runs, all its rows included.
            replace(rates, layer_us=self._layer_us, row_us=0.0),
            hit_rates=(measured.hits_L / used_L).tolist(),
            used=used_L.tolist(),
            context_tokens=run.size * self._context,
            num_rows=run.size,
        )
        return cost.total_ms

    def _link_bytes(self, measured: Measured) -> float:
        """Of one step."""
        layers = self._engine.geometry.layers
        misses = map(float, measured.misses_L)
        return sum(m * layer.expert.record_bytes for m, layer in zip(misses, layers, strict=True))

    @staticmethod
    def _speed(run: DecodeRun, measured: Measured) -> float:
        """Tokens per second of all rows together."""
        return 1e3 * run.size / float(np.mean(measured.times))

    def _name(self, run: DecodeRun, words: str) -> str:
        batch = f", batch {run.size}" if run.size > 1 else ""
        return f"{self._shape}, {words}, {self._context} context{batch}"

    @staticmethod
    def _row(
        case: str,
        figure: str,
        unit: str,
        values: list[float],
        *,
        sol: float | None = None,
        against: tuple[str, float] | None = None,
    ) -> Row:
        """A row; `against` is a baseline and the ratio to it."""
        spread = Spread.of(values)
        baseline, ratio = against or (None, None)
        return Row(
            bench="decode",
            case=case,
            figure=figure,
            unit=unit,
            **vars(spread),
            sol=sol,
            ratio_to_sol=None if sol is None else sol / spread.p50,
            baseline=baseline,
            ratio_to_baseline=ratio,
        )
