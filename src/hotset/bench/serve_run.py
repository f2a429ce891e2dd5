"""Streams through an engine's scheduler, under replayed routing: started, stepped and timed.

Knows when tokens came, hits and misses; not what they are compared with. Every stream is asked for
at once and ends at its last token alone; no token that a random model draws ends it. Prompts of the
streams run before any of them is answered.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch

from hotset.bench.prefill_run import EvenRouting
from hotset.bench.replay import Replay, ReplayedRouting
from hotset.bench.serve_load import LONG_REPEATS, WARM_TOKENS, Load
from hotset.core.errors import HardwareError
from hotset.core.request import SamplingParams
from hotset.models.seam import experts_modules
from hotset.runtime.engine import Engine
from hotset.runtime.parts import Parts
from hotset.runtime.prefill import BetweenLayers, run_together
from hotset.runtime.requests import Event, Request
from hotset.runtime.routing import Traffic
from hotset.runtime.scheduler import Scheduler
from hotset.runtime.sequences import Sequence

# A random model that takes the most likely token soon says one for ever; drawn ones vary.
_SAMPLING = SamplingParams(temperature=1.0, seed=0)


@dataclass
class Timeline:
    """When tokens came.

    Attributes:
        times: request -> seconds of its tokens.
        ended: requests that have had their last one.
    """

    times: dict[int, list[float]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def take(self, event: Event) -> None:
        """One event, now.

        Raises:
            HardwareError: a request failed.
        """
        if event.error is not None:
            raise HardwareError(f"a stream failed: {event.error.message}")
        if event.token_id is not None:
            self.times[event.request_id].append(time.perf_counter())
        if event.finish_reason is not None:
            self.ended.add(event.request_id)

    def gaps_ms(self, since: float) -> list[float]:
        """Between two tokens of the same stream, both behind `since`."""
        return [
            1e3 * (later - earlier)
            for times in self.times.values()
            for earlier, later in pairwise(times)
            if earlier >= since
        ]

    def num_since(self, since: float, requests: set[int]) -> int:
        """Tokens of these requests behind `since`."""
        return sum(at > since for request in requests for at in self.times[request])


@dataclass(frozen=True)
class Measured:
    """Streams side by side.

    Attributes:
        num_tokens, seconds: of all streams together, in the time in which all of them ran.
        gaps_ms: between two tokens of a stream.
        traffic: experts used and hit in that time.
    """

    num_tokens: int
    seconds: float
    gaps_ms: list[float]
    traffic: Traffic

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Beside:
    """Streams while long prompts are taken in, one entry for each prompt.

    Attributes:
        alone, during: tokens per second of the streams, before the prompt and beside it.
        first_seconds: until the prompt's first token.
    """

    alone: list[float]
    during: list[float]
    first_seconds: list[float]


class ServeRun:
    """Streams of one engine.

    Args:
        engine: over a KV pool, with rows for all of the load.
        replay: what decode steps route, of as many rows as the largest step. Prompts beyond a
            step's tokens are sent to experts by chance, evenly.
    """

    def __init__(self, engine: Engine, load: Load, replay: Replay) -> None:
        assert engine.decoding is not None, engine.geometry.attention_reason
        self._engine, self._decoding, self._load = engine, engine.decoding, load
        self._replay = replay
        self._routing = ReplayedRouting(replay, device=engine.device)
        self._even = EvenRouting(engine.geometry)
        self._modules = list(experts_modules(engine.model).values())
        self._generator = torch.Generator().manual_seed(0)

    @contextmanager
    def routed(self) -> Iterator[None]:
        """What is measured runs within this block: decode steps are made for it, once."""

        def ids(size: int, layer: int) -> torch.Tensor:
            return self._routing.ids(layer)[:size]

        with self._decoding.routed(ids, before=self._routing.advance):
            yield

    def streams(self, num_streams: int) -> Measured:
        """That many side by side.

        Raises:
            HardwareError: one of them failed, or ended before all had their tokens.
        """
        with self._scheduling(prefill_share=1.0) as scheduler:
            timeline, streams = Timeline(), set[int]()
            for _ in range(num_streams):
                streams.add(self._submit(scheduler, timeline, self._load.longest))
            self._step_until(scheduler, timeline, streams, num_tokens=WARM_TOKENS)
            before, start = self._engine.traffic, time.perf_counter()
            self._step_until(scheduler, timeline, streams, num_tokens=self._load.num_tokens)
            return Measured(
                num_tokens=timeline.num_since(start, streams),
                seconds=time.perf_counter() - start,
                gaps_ms=timeline.gaps_ms(start),
                traffic=self._engine.traffic.minus(before),
            )

    def beside_prompts(self) -> Beside:
        """Streams beside long prompts that come one after the other.

        Raises:
            HardwareError: as in `streams`, or the prompts took longer than the streams.
        """
        with self._scheduling(prefill_share=self._engine.config.prefill_share) as scheduler:
            timeline, found = Timeline(), Beside([], [], [])
            self._take_in_long(scheduler, timeline)  # what is made at the first prompt is made
            streams = {
                self._submit(scheduler, timeline, self._load.longest)
                for _ in range(self._load.num_beside)
            }
            for _ in range(LONG_REPEATS):
                self._step_until(scheduler, timeline, streams, num_tokens=WARM_TOKENS)
                found.alone.append(self._rate_alone(scheduler, timeline, streams))
                start, seconds = self._take_in_long(scheduler, timeline)
                if timeline.ended & streams:
                    self._refuse(timeline, streams, wanted="the last long prompt is in")
                found.during.append(timeline.num_since(start, streams) / seconds)
                found.first_seconds.append(seconds)
        return found

    def _rate_alone(self, scheduler: Scheduler, timeline: Timeline, streams: set[int]) -> float:
        start, num_tokens = time.perf_counter(), -(-self._load.num_tokens // 2)
        self._step_until(scheduler, timeline, streams, num_tokens=num_tokens)
        return timeline.num_since(start, streams) / (time.perf_counter() - start)

    def _take_in_long(self, scheduler: Scheduler, timeline: Timeline) -> tuple[float, float]:
        """A long prompt up to its first and only token; when it came, and the seconds."""
        start = time.perf_counter()
        long = self._submit(scheduler, timeline, 1, num_prompt=self._load.num_long)
        while long not in timeline.ended:
            self._step(scheduler, timeline)
        return start, time.perf_counter() - start

    @contextmanager
    def _scheduling(self, *, prefill_share: float) -> Iterator[Scheduler]:
        def change(parts: Parts) -> Parts:
            return replace(parts, take_in=self._take_in, prefill_share=prefill_share)

        self._routing.restart(self._replay)
        with self._engine.scheduling(max_waiting=self._load.num_rows, change=change) as scheduler:
            yield scheduler

    def _take_in(
        self, sequence: Sequence, ids: list[int], between_layers: BetweenLayers | None
    ) -> torch.Tensor:
        """Runs a prompt as the engine does, with other routing."""
        run = partial(
            run_together,
            modules=self._modules,
            experts=lambda layer, blocks: self._engine.run_experts(
                layer, self._even(layer, blocks)
            ),
            between_layers=between_layers,
        )
        size = self._engine.plan.prefill_chunk
        return sequence.take_in(
            [ids[start : start + size] for start in range(0, len(ids), size)], run
        )

    def _submit(
        self,
        scheduler: Scheduler,
        timeline: Timeline,
        num_tokens: int,
        *,
        num_prompt: int | None = None,
    ) -> int:
        vocab = self._engine.geometry.vocab
        length = self._load.num_prompt if num_prompt is None else num_prompt
        ids = torch.randint(0, vocab, (length,), generator=self._generator).tolist()
        request = Request(prompt_ids=ids, max_tokens=num_tokens, sampling=_SAMPLING)
        number = scheduler.submit(request)
        timeline.times[number] = []
        return number

    def _step_until(
        self, scheduler: Scheduler, timeline: Timeline, streams: set[int], *, num_tokens: int
    ) -> None:
        """Steps until each stream has had so many more tokens."""
        wanted = {one: len(timeline.times[one]) + num_tokens for one in streams}
        while any(len(timeline.times[one]) < least for one, least in wanted.items()):
            if timeline.ended & streams:
                self._refuse(timeline, streams, wanted=f"each has had {num_tokens} more")
            self._step(scheduler, timeline)

    def _refuse(self, timeline: Timeline, streams: set[int], *, wanted: str) -> None:
        counts = sorted(len(timeline.times[one]) for one in streams)
        raise HardwareError(
            f"a stream ended at its {self._load.longest} tokens before {wanted}: the "
            f"{len(streams)} streams have had {counts[0]} to {counts[-1]}",
            hint="a smaller `--long-prompt`, or `--prefill-share 1`, gives streams less to do "
            "beside it",
        )

    @staticmethod
    def _step(scheduler: Scheduler, timeline: Timeline) -> None:
        for event in scheduler.step(timeline.take):
            timeline.take(event)
