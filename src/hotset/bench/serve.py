"""`bench serve`: several streams at once through the scheduler, as a server answers them.

Prompts and weights are random: a random router spreads tokens evenly, so a hit rate is about the
share of slots. Each speed stands beside what the cost model says at the hits that it had, with
rates measured in the same run. HTTP is left out: it runs in another thread, and a random model has
no text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import quantiles

import torch

from hotset.bench.random_weights import RandomWeights
from hotset.bench.rates import measure_rates, with_known
from hotset.bench.rows import Row, Spread
from hotset.core.config import EngineConfig
from hotset.core.costmodel import decode_step, predict_step
from hotset.core.errors import CapacityError, HardwareError
from hotset.runtime.engine import Engine
from hotset.runtime.planning import plan_engine
from hotset.runtime.requests import Event, Request
from hotset.runtime.routing import Traffic
from hotset.runtime.scheduler import Scheduler
from hotset.runtime.weights import Progress

# Tokens of each stream before the clock starts: kernels are compiled, slots have filled.
WARM_TOKENS = 16
# That a stream may be ahead of one that began after it, for each stream: prompts take their time.
AHEAD_TOKENS = 64
# Most that a stream runs beside a long prompt; that is many times what the prompt takes.
BESIDE_TOKENS = 1024

COST_MODEL = "the cost model at these hits"


@dataclass(frozen=True)
class Load:
    """What is asked for at the same time.

    Attributes:
        streams: numbers of streams, each a run.
        num_prompt, num_tokens: of each stream.
        num_long: tokens of the prompt that comes while the most streams run; 0 leaves it out.
    """

    streams: tuple[int, ...]
    num_prompt: int
    num_tokens: int
    num_long: int

    @property
    def context_tokens(self) -> int:
        """Of the longest request."""
        return max(self.num_prompt + self.longest, self.num_long + 1)

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        beside = BESIDE_TOKENS if self.num_long else 0
        ahead = AHEAD_TOKENS * max(self.streams)
        return max(WARM_TOKENS + self.num_tokens + ahead, beside)

    def config(self, config: EngineConfig) -> EngineConfig:
        """An engine's, with rows and KV cache for all of it."""
        most = max(self.streams)
        return replace(
            config,
            max_batch=most + bool(self.num_long),
            context_tokens=self.context_tokens,
            kv_tokens=most * (self.num_prompt + self.longest) + self.num_long + 1,
        )


def with_slots(source: RandomWeights, config: EngineConfig, share: float) -> EngineConfig:
    """The config with as much device memory as that share of all experts in slots takes.

    Raises:
        CapacityError: the device has no room for so many.
    """
    geometry = source.geometry
    _, plan = plan_engine(geometry, config)
    plan.require_fit()
    wanted = round(share * geometry.num_records)
    slot_bytes = max(layer.expert.record_bytes for layer in geometry.layers)
    vram_bytes, num_slots = plan.device.total_bytes, plan.num_slots
    # Fewer slots bring a staging ring, which takes memory in its turn: so not in one step.
    for _ in range(8):
        vram_bytes += (wanted - num_slots) * slot_bytes
        if config.vram_bytes is not None and vram_bytes > config.vram_bytes:
            break
        sized = replace(config, vram_bytes=vram_bytes, prefill_chunk=plan.prefill_chunk)
        num_slots = plan_engine(geometry, sized)[1].require_fit().num_slots
        if num_slots == wanted:
            return sized
    raise CapacityError(
        f"`--slots {share:g}` are {wanted} slots, {num_slots} fit",
        hint="lower `--slots` or what is asked for at once, or cut with `--layers`",
    )


def bench_serve(
    source: RandomWeights, config: EngineConfig, load: Load, *, shape: str, progress: Progress
) -> Iterator[Row]:
    """Rows of one engine.

    Args:
        config: from `Load.config`.
        shape: its name, for the rows.
    """
    with Engine(source, config, progress=progress) as engine:
        share = engine.plan.num_slots / engine.geometry.num_records
        bench = ServeBench(engine, load, name=f"{shape}, {share:.0%} slots")
        yield from bench.run()


@dataclass
class Timeline:
    """When tokens came.

    Attributes:
        times: request -> seconds of its tokens.
        is_over: some request has ended.
    """

    times: dict[int, list[float]] = field(default_factory=dict)
    is_over: bool = False

    def take(self, event: Event) -> None:
        """One event, now.

        Raises:
            HardwareError: a request failed.
        """
        if event.error is not None:
            raise HardwareError(f"a stream failed: {event.error.message}")
        if event.token_id is not None:
            self.times[event.request_id].append(time.perf_counter())
        self.is_over = self.is_over or event.finish_reason is not None

    def gaps_ms(self, since: float) -> list[float]:
        """Between two tokens of the same stream, both behind `since`."""
        return [
            1e3 * (later - earlier)
            for times in self.times.values()
            for earlier, later in pairwise(times)
            if earlier >= since
        ]

    def num_since(self, since: float) -> int:
        """Tokens behind `since`, of all streams."""
        return sum(time > since for times in self.times.values() for time in times)


class ServeBench:
    """Runs streams through an engine's scheduler.

    Args:
        engine: with rows for all of the load.
        name: model and slots, for the rows.
    """

    def __init__(self, engine: Engine, load: Load, *, name: str) -> None:
        self._engine, self._load, self._name = engine, load, name
        self._rates = with_known(measure_rates(engine.store), engine.machine)
        self._generator = torch.Generator().manual_seed(0)

    def run(self) -> Iterator[Row]:
        """Each number of streams, and then the long prompt beside the most of them."""
        for num_streams in self._load.streams:
            with self._engine.scheduling(max_waiting=num_streams) as scheduler:
                yield from self._streams(scheduler, num_streams)
        if self._load.num_long:
            with self._engine.scheduling(max_waiting=max(self._load.streams) + 1) as scheduler:
                yield from self._beside_a_prompt(scheduler, max(self._load.streams))

    def _start(self, scheduler: Scheduler, num_streams: int, num_tokens: int) -> Timeline:
        """Streams that have given out their warm tokens."""
        timeline = Timeline()
        for _ in range(num_streams):
            timeline.times[self._submit(scheduler, self._load.num_prompt, num_tokens)] = []
        while min(map(len, timeline.times.values())) < WARM_TOKENS:
            self._step(scheduler, timeline)
        return timeline

    def _submit(self, scheduler: Scheduler, num_prompt: int, num_tokens: int) -> int:
        vocab = self._engine.geometry.vocab
        ids = torch.randint(0, vocab, (num_prompt,), generator=self._generator).tolist()
        return scheduler.submit(Request(prompt_ids=ids, max_tokens=num_tokens))

    @staticmethod
    def _step(scheduler: Scheduler, timeline: Timeline) -> None:
        for event in scheduler.step(timeline.take):
            timeline.take(event)

    def _streams(self, scheduler: Scheduler, num_streams: int) -> Iterator[Row]:
        # Streams that began earlier are further: the first to end ends what is measured.
        timeline = self._start(scheduler, num_streams, self._load.longest)
        before, start = self._engine.traffic, time.perf_counter()
        while not timeline.is_over and timeline.num_since(start) < self._wanted(num_streams):
            self._step(scheduler, timeline)
        seconds = time.perf_counter() - start
        if not timeline.gaps_ms(start):
            raise HardwareError("the first stream ended before the last one had begun")
        traffic = self._engine.traffic.minus(before)
        case = f"{self._name}, {num_streams} streams"
        yield from self._speed(case, num_streams, timeline.num_since(start) / seconds, traffic)
        gaps = timeline.gaps_ms(start)
        yield _row(case, "between two tokens of a stream", "ms", gaps)
        p99 = quantiles(gaps, n=100, method="inclusive")[98] if len(gaps) > 1 else gaps[0]
        yield _row(case, "between two tokens of a stream, 99th percentile", "ms", [p99])
        yield _row(case, "hit rate", "share", [traffic.hit_rate])

    def _wanted(self, num_streams: int) -> int:
        return num_streams * self._load.num_tokens

    def _speed(
        self, case: str, num_streams: int, tokens_per_second: float, traffic: Traffic
    ) -> Iterator[Row]:
        """All streams together, beside the speed of light and the prediction."""
        layers = self._engine.geometry.layers
        used = traffic.used / traffic.steps / len(layers)
        cached = num_streams * (self._load.num_prompt + WARM_TOKENS + self._load.num_tokens // 2)
        light = decode_step(
            self._engine.geometry,
            self._rates,
            hits=[used * traffic.hit_rate] * len(layers),
            misses=[used * (1 - traffic.hit_rate)] * len(layers),
            context_tokens=cached,
        )
        expected = predict_step(
            self._engine.geometry,
            self._rates,
            hit_rates=[traffic.hit_rate] * len(layers),
            used=[used] * len(layers),
            context_tokens=cached,
            num_rows=num_streams,
        )
        sol, predicted = (num_streams * 1e3 / cost.total_ms for cost in (light, expected))
        row = _row(case, "all streams", "tokens/s", [tokens_per_second])
        yield replace(
            row,
            sol=sol,
            ratio_to_sol=tokens_per_second / sol,
            baseline=COST_MODEL,
            ratio_to_baseline=tokens_per_second / predicted,
        )
        yield _row(case, "all streams, predicted", "tokens/s", [predicted])

    def _beside_a_prompt(self, scheduler: Scheduler, num_streams: int) -> Iterator[Row]:
        timeline = self._start(scheduler, num_streams, BESIDE_TOKENS)
        start = time.perf_counter()
        while timeline.num_since(start) < self._wanted(num_streams) // 2:
            self._step(scheduler, timeline)
        alone = timeline.num_since(start) / (time.perf_counter() - start)

        long = self._submit(scheduler, self._load.num_long, 1)
        timeline.times[long] = []
        start = time.perf_counter()
        while not timeline.is_over:
            self._step(scheduler, timeline)
        seconds = time.perf_counter() - start
        if not timeline.times[long]:
            raise HardwareError(f"{BESIDE_TOKENS} tokens took less time than the long prompt")
        beside = (timeline.num_since(start) - 1) / seconds
        case = f"{self._name}, {num_streams} streams and a prompt of {self._load.num_long} tokens"
        yield _row(case, "streams during the prompt", "tokens/s", [beside])
        yield _row(case, "rate that streams keep", "share", [beside / alone])
        yield _row(case, "first token of the prompt", "s", [seconds])


def _row(case: str, figure: str, unit: str, values: Sequence[float]) -> Row:
    return Row(bench="serve", case=case, figure=figure, unit=unit, **vars(Spread.of(values)))
