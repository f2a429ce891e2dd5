"""`hotset bench serve`: flags of the benchmark of several streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli.bench_options import (
    Layers,
    Rows,
    Shape,
    check_writable,
    read_counts,
    read_shares,
    report,
)
from hotset.cli.options import (
    Device,
    Json,
    KernelsOption,
    PrefillShare,
    Vram,
    check_count,
    engine_config,
)
from hotset.cli.progress import loading_bar
from hotset.core.config import EngineConfig

if TYPE_CHECKING:
    from hotset.bench.rows import Row


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
        str, typer.Option(metavar="SHARES", help="Shares of experts with a slot, each a load.")
    ] = "0.25,0.5,1",
    prompt_tokens: Annotated[int, typer.Option(help="Random prompt ids of a stream.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of a stream that are timed.")] = 128,
    long_prompt: Annotated[
        int, typer.Option(help="Tokens of a prompt beside the most streams; 0 leaves it out.")
    ] = 8192,
    prefill_share: PrefillShare = EngineConfig.prefill_share,
    rows: Rows = None,
    as_json: Json = False,
) -> None:
    """Answer several streams at once, as a server does, against the cost model.

    Example: `hotset bench serve --shape qwen3-30b-a3b --streams 1,8 --slots 0.25`
    """
    counts = read_counts(streams, "--streams")
    shares = read_shares(slots, "--slots")
    check_count("--layers", layers)
    check_count("--prompt-tokens", prompt_tokens)
    check_count("--tokens", tokens, least=2)
    check_count("--long-prompt", long_prompt, least=0)
    check_writable(rows)
    config = engine_config(
        f"random {shape}", vram=vram, device=device, kernels=kernels, prefill_share=prefill_share
    )
    from hotset.bench.random_weights import RandomWeights
    from hotset.bench.serve import Load, bench_serve, with_slots
    from hotset.bench.shapes import shape_config

    source = RandomWeights(shape_config(shape, num_layers=layers))
    load = Load(tuple(counts), prompt_tokens, tokens, long_prompt)
    config = load.config(config)
    found: list[Row] = []
    for each in [with_slots(source, config, share) for share in shares]:
        with loading_bar() as progress:
            found += bench_serve(source, each, load, shape=shape, progress=progress)
    report(found, rows, as_json=as_json)
