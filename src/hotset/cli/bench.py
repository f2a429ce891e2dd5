"""`hotset bench`: measures this machine with random models of published shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from hotset.cli.bench_decode import decode
from hotset.cli.bench_load import load
from hotset.cli.bench_options import (
    Format,
    Layers,
    Rows,
    Shape,
    case_name,
    check_layers,
    report,
    weight_format,
)
from hotset.cli.bench_serve import serve
from hotset.cli.lists import read_counts, read_shares
from hotset.cli.options import (
    Context,
    Device,
    Json,
    KernelsOption,
    PrefillChunk,
    Vram,
    check_count,
    engine_config,
    named_by_flag,
)
from hotset.cli.outputs import check_writable
from hotset.cli.plotting import check_plot_path
from hotset.cli.progress import loading_bar
from hotset.core.errors import CapacityError

app = typer.Typer(no_args_is_help=True, help="Measure this machine, with random models by shape.")


@app.command()
def experts(  # noqa: PLR0913 - one parameter for each flag
    *,
    shape: Shape = "qwen3-30b-a3b",
    format_: Format = "plain",
    layers: Layers = None,
    device: Device = None,
    kernels: KernelsOption = None,
    hits: Annotated[
        str,
        typer.Option(metavar="SHARES", help="Shares of routed experts that have a slot, 0..1."),
    ] = "0,0.25,0.5,0.9,1",
    tokens: Annotated[
        str, typer.Option(metavar="COUNTS", help="Tokens of a step, from 1 on.")
    ] = "1",
    match: Annotated[bool, typer.Option(help="With the match rule, as a step that fills.")] = False,
    rows: Rows = None,
    as_json: Json = False,
) -> None:
    """Time the expert kernels alone against the speed of light of link and HBM.

    Example: `hotset bench experts --shape qwen3-30b-a3b --hits 0,0.5,1 --tokens 1,8`
    """
    counts, shares = read_counts(tokens, "--tokens"), read_shares(hits, "--hits")
    weights = weight_format(format_)
    check_layers(layers)
    check_writable(rows, flag="--rows")
    from hotset.bench.experts import ExpertsCase, bench_experts, half
    from hotset.bench.random_weights import RandomWeights
    from hotset.bench.shapes import shape_config
    from hotset.core.slot_pools import SlotPools
    from hotset.experts.store import ExpertStore
    from hotset.kernels.dispatch import select_kernels
    from hotset.runtime.probe import choose_device

    with named_by_flag():
        where = choose_device(device)
    source = RandomWeights(shape_config(shape, num_layers=layers), weights=weights)
    moe = source.geometry.layers
    pools = SlotPools.build(
        num_experts=[layer.num_experts for layer in moe],
        record_bytes=[layer.expert.record_bytes for layer in moe],
        num_slots={moe[0].expert.record_bytes: sum(half(layer) for layer in moe)},
    )
    with _smaller_shape_hint(), ExpertStore(moe, pools, device=where, staging_records=0) as store:
        with loading_bar() as progress:
            source.fill_experts(store, progress)
        found = bench_experts(
            store,
            select_kernels(where, kernels),
            [ExpertsCase(hits=h, num_tokens=t, match=match) for t in counts for h in shares],
            shape=case_name(shape, format_),
        )
        report(found, rows, as_json=as_json)


@app.command()
def generate(  # noqa: PLR0913 - one parameter for each flag
    *,
    shape: Shape = "qwen3-30b-a3b",
    format_: Format = "plain",
    layers: Layers = None,
    vram: Vram = None,
    device: Device = None,
    context: Context = None,
    prefill_chunk: PrefillChunk = None,
    kernels: KernelsOption = None,
    prompt_tokens: Annotated[int, typer.Option(help="Random prompt ids.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate, from 2 on.")] = 32,
    rows: Rows = None,
    as_json: Json = False,
) -> None:
    """Load a random model within a budget and generate, planned against measured.

    Example: `hotset bench generate --shape qwen3-30b-a3b --vram 16GiB`
    """
    config = engine_config(
        f"random {shape}",
        vram=vram,
        device=device,
        context=context,
        prefill_chunk=prefill_chunk,
        kernels=kernels,
    )
    weights = weight_format(format_)
    check_layers(layers)
    check_count("--prompt-tokens", prompt_tokens)
    check_count("--max-tokens", max_tokens, least=2)  # speed counts from the second one on
    check_writable(rows, flag="--rows")
    from hotset.bench.generate import bench_generate, check_room
    from hotset.bench.random_weights import RandomWeights
    from hotset.bench.shapes import shape_config

    source = RandomWeights(shape_config(shape, num_layers=layers), weights=weights)
    with named_by_flag():
        check_room(source, config, num_prompt=prompt_tokens, num_tokens=max_tokens)
    with loading_bar() as progress:
        found = list(
            bench_generate(
                source,
                config,
                shape=case_name(shape, format_),
                num_prompt=prompt_tokens,
                num_tokens=max_tokens,
                progress=progress,
            )
        )
    report(found, rows, as_json=as_json)


@app.command()
def prefill(  # noqa: PLR0913 - one parameter for each flag
    *,
    shape: Shape = "qwen3-30b-a3b",
    format_: Format = "plain",
    layers: Layers = None,
    vram: Vram = None,
    device: Device = None,
    prefill_chunk: PrefillChunk = None,
    kernels: KernelsOption = None,
    tokens: Annotated[
        str, typer.Option(metavar="COUNTS", help="Lengths of prompts.")
    ] = "1,16,64,256,1024,4096,16384,65536",
    slots: Annotated[float, typer.Option(help="Share of experts with a slot, 0..1.")] = 0.25,
    staging: Annotated[str | None, typer.Option(help="Force `ring` or `in-place`.")] = None,
    offload_layers: Annotated[
        int, typer.Option(help="Layers of the comparison with accelerate; 0 leaves it out.")
    ] = 4,
    repeats: Annotated[int, typer.Option(help="Of each measurement.")] = 3,
    plot: Annotated[
        Path | None, typer.Option(help="Draw times over lengths: a .png or .svg file.")
    ] = None,
    rows: Rows = None,
    as_json: Json = False,
) -> None:
    """Time prompts of many lengths against the speed of light and what else one would run.

    Example: `hotset bench prefill --shape qwen3-30b-a3b --vram 40GiB --tokens 1024,8192,32768`
    """
    lengths = read_counts(tokens, "--tokens")
    (share,) = read_shares(str(slots), "--slots")
    weights = weight_format(format_)
    check_layers(layers)
    check_count("--offload-layers", offload_layers, least=0)
    check_count("--repeats", repeats)
    check_writable(rows, flag="--rows")
    if plot is not None:
        check_plot_path(plot)
    config = engine_config(
        f"random {shape}",
        vram=vram,
        device=device,
        context=max(lengths) + 1,
        prefill_chunk=prefill_chunk,
        kernels=kernels,
        staging=staging,
        workload=",".join(f"{length}+1" for length in lengths),  # prompts are all that is timed
    )
    from hotset.bench.prefill import PrefillBench
    from hotset.bench.random_weights import RandomWeights
    from hotset.bench.serve_load import with_slots
    from hotset.bench.shapes import shape_config
    from hotset.runtime.engine import Engine

    longest = max(lengths) + 1  # and the first token
    stock = shape_config(shape, num_layers=layers, context_tokens=longest)
    source = RandomWeights(stock, weights=weights)
    if vram is None:  # with all of a large device every expert would have a slot, and no ring
        config = with_slots(source, config, share)
    with loading_bar() as progress:
        engine = Engine(source, config, progress=progress)
    with engine:
        bench = PrefillBench(engine, shape=case_name(shape, format_), slots=share, repeats=repeats)
        found = report(bench.run(lengths, offload_layers=offload_layers), rows, as_json=as_json)
    if plot is not None:
        from hotset.cli.prefill_plot import draw

        draw(found, plot)


app.command()(decode)
app.command()(load)
app.command()(serve)


@contextmanager
def _smaller_shape_hint() -> Iterator[None]:
    """A benchmark has no plan, so what helps against too little memory is another shape."""
    try:
        yield
    except CapacityError as error:
        raise CapacityError(
            error.message, hint="cut the depth with `--layers`, or use `--shape tiny`"
        ) from error
