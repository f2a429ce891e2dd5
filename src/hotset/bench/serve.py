"""`bench serve`: several streams at once through the scheduler, as a server answers them.

Weights are random, and so decode steps replay routing: a random router says nothing about caching.
Each speed stands beside what the cost model says at the hits that it had, with rates measured in
the same run. HTTP is left out: it runs in another thread, and a random model has no text. Makes
rows of what `serve_run` measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import quantiles

from hotset.bench.decode_cases import DecodeCase, PolicyChoice, percent
from hotset.bench.random_weights import RandomWeights
from hotset.bench.rates import measure_rates, with_known
from hotset.bench.replay import Replay
from hotset.bench.rows import Row, Spread
from hotset.bench.serve_load import WARM_TOKENS, Load
from hotset.bench.serve_run import Beside, Measured, ServeRun
from hotset.core.config import EngineConfig
from hotset.core.costmodel import decode_step, predict_step
from hotset.runtime.engine import Engine
from hotset.runtime.weights import Progress

COST_MODEL = "the cost model at these hits"


def bench_serve(
    source: RandomWeights,
    config: EngineConfig,
    load: Load,
    replay: Replay,
    shares: Sequence[float],
    *,
    shape: str,
    progress: Progress,
) -> Iterator[Row]:
    """Rows of one loaded engine.

    Args:
        config: from `Load.config`, with the slots of the largest share.
        replay: what decode steps route, of as many rows as the largest step.
        shares: of all experts in slots; one of them, or such as `loads_of` puts together.
        shape: its name, for the rows.
    """
    with Engine(source, config, progress=progress) as engine:
        bench = ServeBench(engine, load, replay, shape=shape)
        yield from bench.run(shares)


class ServeBench:
    """Streams of an engine, as rows.

    Args:
        engine, load, replay: see `ServeRun`.
        shape: its name, for the rows.
    """

    def __init__(self, engine: Engine, load: Load, replay: Replay, *, shape: str) -> None:
        self._engine, self._load, self._shape = engine, load, shape
        self._rates = with_known(measure_rates(engine.store), engine.machine)
        self._run = ServeRun(engine, load, replay)

    def run(self, shares: Sequence[float]) -> Iterator[Row]:
        """For each share of slots every number of streams, and then streams beside a long
        prompt."""
        with self._run.routed():
            for share in shares:
                name = f"{self._shape}, {percent(share)} slots"
                alone: float | None = None
                for num_streams in self._load.streams:
                    self._place(share)
                    measured = self._run.streams(num_streams)
                    yield from self._rows(name, num_streams, measured, alone)
                    alone = measured.tokens_per_second if num_streams == 1 else alone
                if self._load.num_long:
                    self._place(share)
                    yield from self._beside(name, self._run.beside_prompts())

    def _place(self, share: float) -> None:
        """Takes slots from all but that share of the experts; fills only ever swap owners."""
        engine = self._engine
        if engine.policy.moves:
            case = DecodeCase(PolicyChoice(engine.policy.name), share)
            engine.place(case.placement(engine.policy, engine.pools))

    def _rows(
        self, name: str, num_streams: int, measured: Measured, alone: float | None
    ) -> Iterator[Row]:
        case = f"{name}, {_streams(num_streams)}"
        sol, predicted = self._speed_of_light(num_streams, measured)
        speed = measured.tokens_per_second
        row = _row(case, "all streams", "tokens/s", [speed])
        yield replace(
            row,
            sol=sol,
            ratio_to_sol=speed / sol,
            baseline=COST_MODEL,
            ratio_to_baseline=speed / predicted,
        )
        yield _row(case, "all streams, predicted", "tokens/s", [predicted])
        if alone is not None:
            row = _row(case, "all streams, against one alone", "tokens/s", [speed])
            yield replace(row, baseline=_streams(1), ratio_to_baseline=speed / alone)
        gaps = measured.gaps_ms
        yield _row(case, "between two tokens of a stream", "ms", gaps)
        p99 = quantiles(gaps, n=100, method="inclusive")[98] if len(gaps) > 1 else gaps[0]
        yield _row(case, "between two tokens of a stream, 99th percentile", "ms", [p99])
        yield _row(case, "hit rate", "share", [measured.traffic.hit_rate])

    def _speed_of_light(self, num_streams: int, measured: Measured) -> tuple[float, float]:
        """Tokens per second of all streams together, as fast as can be and as predicted."""
        geometry, traffic = self._engine.geometry, measured.traffic
        num_layers = len(geometry.layers)
        used = traffic.used / traffic.steps / num_layers
        cached = num_streams * (self._load.num_prompt + WARM_TOKENS + self._load.num_tokens // 2)
        light = decode_step(
            geometry,
            self._rates,
            hits=[used * traffic.hit_rate] * num_layers,
            misses=[used * (1 - traffic.hit_rate)] * num_layers,
            context_tokens=cached,
        )
        expected = predict_step(
            geometry,
            self._rates,
            hit_rates=[traffic.hit_rate] * num_layers,
            used=[used] * num_layers,
            context_tokens=cached,
            num_rows=num_streams,
        )
        return num_streams * 1e3 / light.total_ms, num_streams * 1e3 / expected.total_ms

    def _beside(self, name: str, found: Beside) -> Iterator[Row]:
        streams = _streams(self._load.num_beside)
        case = f"{name}, {streams} and a prompt of {self._load.num_long} tokens"
        yield _row(case, "streams before the prompt", "tokens/s", found.alone)
        yield _row(case, "streams during the prompt", "tokens/s", found.during)
        kept = [beside / alone for beside, alone in zip(found.during, found.alone, strict=True)]
        yield _row(case, "rate that streams keep", "share", kept)
        yield _row(case, "first token of the prompt", "s", found.first_seconds)


def _streams(number: int) -> str:
    return f"{number} streams" if number > 1 else "1 stream"


def _row(case: str, figure: str, unit: str, values: Sequence[float]) -> Row:
    return Row(bench="serve", case=case, figure=figure, unit=unit, **vars(Spread.of(values)))
