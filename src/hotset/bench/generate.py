"""`bench generate`: a random model within a budget, loaded and run by the real engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from hotset.api import Model
from hotset.bench.random_weights import RandomWeights
from hotset.bench.rows import Row, Spread
from hotset.core.config import EngineConfig
from hotset.core.request import check_length
from hotset.core.units import format_bytes
from hotset.runtime.engine import Engine
from hotset.runtime.planning import plan_engine
from hotset.runtime.weights import Progress


def check_room(
    source: RandomWeights, config: EngineConfig, *, num_prompt: int, num_tokens: int
) -> None:
    """Refuses, before anything is loaded, an answer that the plan has no room for.

    Raises:
        CapacityError: the plan does not fit.
        ContextLengthError: its context is too short.
    """
    _, plan = plan_engine(source.geometry, config)
    check_length(num_prompt, num_tokens, plan.require_fit().context_tokens)


def bench_generate(
    source: RandomWeights,
    config: EngineConfig,
    *,
    shape: str,
    num_prompt: int,
    num_tokens: int,
    progress: Progress,
) -> Iterator[Row]:
    """Loads, generates, and compares with the plan.

    The prompt is random ids: a random router spreads them evenly, so the hit rate says nothing
    about real text.
    """
    budget = "" if config.vram_bytes is None else f", {format_bytes(config.vram_bytes)} of VRAM"
    case = f"{shape}{budget}, {num_prompt} prompt tokens"
    start = time.perf_counter()
    with Model(Engine(source, config, progress=progress)) as model:
        load_seconds = time.perf_counter() - start
        vocab = model.engine.geometry.vocab
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(0, vocab, (num_prompt,), generator=generator).tolist()
        for _ in model.generate(token_ids=prompt, max_tokens=2):
            pass  # compiles kernels
        for _ in model.generate(token_ids=prompt, max_tokens=num_tokens):
            pass
        stats, plan = model.stats, model.plan
    planned = plan.device.total_bytes
    if stats.device_peak_bytes:
        planned -= plan.device["CUDA context"]  # torch's allocator does not see it
    figures = {
        ("load and fill", "s"): load_seconds,
        ("first token", "s"): stats.first_token_seconds,
        ("decode", "tokens/s"): stats.tokens_per_second,
        ("hit rate", "share"): stats.hit_rate,
        ("link bytes per token", "bytes"): stats.link_bytes_per_token,
        ("slots", "slots"): float(stats.num_slots),
        ("device peak", "bytes"): float(stats.device_peak_bytes),
        ("device plan", "bytes"): float(planned),
        ("host peak", "bytes"): float(stats.host_peak_bytes),
        ("host plan", "bytes"): float(plan.host.total_bytes),
    }
    for (figure, unit), value in figures.items():
        spread = Spread.of([value])
        yield Row(bench="generate", case=case, figure=figure, unit=unit, **vars(spread))
