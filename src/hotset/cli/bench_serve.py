"""`hotset bench serve`: flags of the benchmark of several streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli.bench_options import (
    Layers,
    Rows,
    Shape,
    check_layers,
    report,
)
from hotset.cli.lists import read_counts, read_shares
from hotset.cli.options import (
    Device,
    Json,
    KernelsOption,
    PrefillShare,
    Vram,
    check_count,
    engine_config,
)
from hotset.cli.outputs import check_writable
from hotset.cli.progress import loading_bar
from hotset.core.config import MAX_BATCH, EngineConfig
from hotset.core.errors import ConfigError

if TYPE_CHECKING:
    from hotset.bench.random_weights import RandomWeights
    from hotset.bench.replay import Replay
    from hotset.bench.rows import Row
    from hotset.bench.serve_load import Load
    from hotset.core.geometry import ModelGeometry


def serve(  # noqa: PLR0913 - one parameter for each flag
    *,
    shape: Shape = "qwen3-30b-a3b",
    layers: Layers = None,
    vram: Vram = None,
    device: Device = None,
    kernels: KernelsOption = None,
    streams: Annotated[
        str, typer.Option(metavar="COUNTS", help="Numbers of streams, each a run.")
    ] = "1,2,4,8",
    slots: Annotated[
        str, typer.Option(metavar="SHARES", help="Shares of experts with a slot.")
    ] = "0.25,0.5,1",
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Routing to replay (see `hotset simulate`); without it experts are drawn by "
            "chance, and hits are the share of slots.",
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Random prompt ids of a stream.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of a stream that are timed.")] = 128,
    long_prompt: Annotated[
        int,
        typer.Option(help="Tokens of prompts beside all streams but one; 0 leaves them out."),
    ] = 8192,
    prefill_share: PrefillShare = EngineConfig.prefill_share,
    rows: Rows = None,
    as_json: Json = False,
) -> None:
    """Answer several streams at once, as a server does, against the cost model.

    Example: `hotset bench serve --trace moe-54m.npz --streams 1,8 --slots 0.25`
    """
    counts = _read_streams(streams)
    shares = read_shares(slots, "--slots")
    check_layers(layers)
    check_count("--prompt-tokens", prompt_tokens)
    check_count("--tokens", tokens, least=2)
    check_count("--long-prompt", long_prompt, least=0)
    check_writable(rows, flag="--rows")
    config = engine_config(
        f"random {shape}", vram=vram, device=device, kernels=kernels, prefill_share=prefill_share
    )
    from hotset.bench.random_weights import RandomWeights
    from hotset.bench.serve_load import WARM_TOKENS, Load
    from hotset.bench.shapes import shape_config

    load = Load(tuple(counts), prompt_tokens, tokens, long_prompt)
    config = load.config(config)
    stock = shape_config(shape, num_layers=layers, context_tokens=load.context_tokens)
    source = RandomWeights(stock)
    if reason := source.geometry.attention_reason:
        raise ConfigError(f"streams of this shape are answered one by one: {reason}")
    num_tokens, num_rows = WARM_TOKENS + tokens, max(config.batch_sizes)
    replay = _replay(trace, source.geometry, num_tokens=num_tokens, num_rows=num_rows)
    typer.echo(replay.note, err=True)
    name = shape if not replay.distortion else f"{shape} ({replay.distortion})"
    report(_rows(source, config, load, replay, shares, name), rows, as_json=as_json)


def _read_streams(text: str) -> list[int]:
    counts = read_counts(text, "--streams")
    if max(counts) > MAX_BATCH:
        raise ConfigError(f"`--streams` has {max(counts)}, the most is {MAX_BATCH}")
    return counts


def _rows(
    source: RandomWeights,
    config: EngineConfig,
    load: Load,
    replay: Replay,
    shares: list[float],
    shape: str,
) -> Iterator[Row]:
    """Of one load after the other; all of them are planned before the first begins."""
    from hotset.bench.serve import bench_serve
    from hotset.bench.serve_load import loads_of, with_slots

    loads = [(group, with_slots(source, config, group[0])) for group in loads_of(shares)]
    for group, sized in loads:
        with loading_bar() as progress:
            yield from bench_serve(
                source, sized, load, replay, group, shape=shape, progress=progress
            )


def _replay(
    trace: Path | None, geometry: ModelGeometry, *, num_tokens: int, num_rows: int
) -> Replay:
    """Routing for the tokens that count and those before them; a longer answer goes round."""
    from hotset.bench.replay import by_chance, map_trace
    from hotset.core.trace import load_trace

    if trace is None:
        return by_chance(geometry, num_tokens=num_tokens, num_rows=num_rows)
    return map_trace(load_trace(trace), geometry, num_tokens=num_tokens, num_rows=num_rows)
