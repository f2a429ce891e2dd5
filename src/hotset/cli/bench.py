"""`hotset bench`: measures this machine with random models of published shapes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli.options import (
    Context,
    Device,
    Json,
    KernelsOption,
    PrefillChunk,
    Vram,
    check_count,
    engine_config,
)
from hotset.cli.progress import loading_bar
from hotset.cli.simulate_plot import check_plot_path
from hotset.core.config import MAX_TOKENS
from hotset.core.errors import CapacityError, ConfigError
from hotset.core.formats import USUAL, WeightFormat
from hotset.core.units import format_bytes

if TYPE_CHECKING:
    from hotset.bench.rows import Row

app = typer.Typer(no_args_is_help=True, help="Measure this machine, with random models by shape.")

Shape = Annotated[str, typer.Option(help="Published shape, e.g. `qwen3-30b-a3b`, or `tiny`.")]
Layers = Annotated[int | None, typer.Option(help="Cut the depth to this many layers.")]
Format = Annotated[
    str, typer.Option("--format", help=f"Format of experts' weights: {', '.join(USUAL)}.")
]
Rows = Annotated[Path | None, typer.Option("--rows", help="Append the rows to this file.")]


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
    ] = "0,0.5,0.9,1",
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
    counts, shares = _counts(tokens, "--tokens"), _shares(hits, "--hits")
    weights = _format(format_)
    check_count("--layers", layers)
    _check_writable(rows)
    from hotset.bench.experts import ExpertsCase, bench_experts, half
    from hotset.bench.random_weights import RandomWeights
    from hotset.bench.shapes import shape_config
    from hotset.core.slot_pools import SlotPools
    from hotset.experts.store import ExpertStore
    from hotset.kernels.dispatch import select_kernels
    from hotset.runtime.probe import choose_device

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
            shape=_case(shape, format_),
        )
        _report(found, rows, as_json=as_json)


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
    weights = _format(format_)
    check_count("--layers", layers)
    check_count("--prompt-tokens", prompt_tokens)
    check_count("--max-tokens", max_tokens, least=2)  # speed counts from the second one on
    _check_writable(rows)
    from hotset.bench.generate import bench_generate
    from hotset.bench.random_weights import RandomWeights
    from hotset.bench.shapes import shape_config

    source = RandomWeights(shape_config(shape, num_layers=layers), weights=weights)
    with loading_bar() as progress:
        found = list(
            bench_generate(
                source,
                config,
                shape=_case(shape, format_),
                num_prompt=prompt_tokens,
                num_tokens=max_tokens,
                progress=progress,
            )
        )
    _report(found, rows, as_json=as_json)


@app.command()
def prefill(  # noqa: PLR0913 - one parameter for each flag
    *,
    shape: Shape = "qwen3-30b-a3b",
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
    lengths = _counts(tokens, "--tokens")
    (share,) = _shares(str(slots), "--slots")
    check_count("--layers", layers)
    check_count("--offload-layers", offload_layers, least=0)
    check_count("--repeats", repeats)
    _check_writable(rows)
    if plot is not None:
        check_plot_path(plot)
    config = engine_config(
        f"random {shape}",
        vram=vram,
        device=device,
        context=max(lengths) + 1,  # and the first token
        prefill_chunk=prefill_chunk,
        kernels=kernels,
        staging=staging,
    )
    from hotset.bench.prefill import PrefillBench, describe_memory
    from hotset.bench.random_weights import RandomWeights
    from hotset.bench.shapes import shape_config
    from hotset.runtime.engine import Engine

    source = RandomWeights(shape_config(shape, num_layers=layers))
    with loading_bar() as progress:
        engine = Engine(source, config, progress=progress)
    with engine:
        bench = PrefillBench(engine, shape=shape, slots=share, repeats=repeats)
        found = _report(bench.run(lengths, offload_layers=offload_layers), rows, as_json=as_json)
        typer.echo(describe_memory(engine), err=True)
    if plot is not None:
        from hotset.cli.prefill_plot import draw

        draw(found, plot)


@app.command()
def decode(  # noqa: PLR0913 - one parameter for each flag
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Routing to replay (see `hotset simulate`).")
    ],
    *,
    shape: Shape = "qwen3-30b-a3b",
    format_: Format = "plain",
    layers: Layers = None,
    vram: Vram = None,
    device: Device = None,
    cases: Annotated[
        str,
        typer.Option(
            metavar="CASES",
            help="Policy (half-life, static, random) and share of experts with a slot.",
        ),
    ] = "half-life:0.25,static:0.25,half-life:0.5,static:0.5",
    context: Annotated[int, typer.Option(help="Tokens in the cache at the start.")] = 1024,
    most_context: Annotated[int, typer.Option(help="Room of the cache, tokens.")] = 33000,
    steps: Annotated[int, typer.Option(help="Steps that count.")] = 256,
    rows: Rows = None,
    as_json: Json = False,
) -> None:
    """Time whole decode steps with routing replayed from a trace, by slots and policy.

    Needs room for every expert on the device; a case gives slots to only a share of them.

    Example: `hotset bench decode moe-54m.npz --cases half-life:0.25,static:0.25,random:1`
    """
    wanted = _cases(cases)
    check_count("--layers", layers)
    _check_lengths(context=context, most_context=most_context, steps=steps)
    _check_writable(rows)
    config = engine_config(f"random {shape}", vram=vram, device=device, context=most_context)
    from hotset.bench.decode import DecodeBench, DecodeCase
    from hotset.bench.random_weights import RandomWeights
    from hotset.bench.replay import map_trace
    from hotset.bench.shapes import shape_config
    from hotset.core.trace import load_trace
    from hotset.runtime.engine import Engine

    recorded = load_trace(trace)
    source = RandomWeights(shape_config(shape, num_layers=layers), weights=_format(format_))
    replay = map_trace(recorded.select(parity="even"), source.geometry, num_tokens=steps + 64)
    others = map_trace(recorded.select(parity="odd"), source.geometry, num_tokens=steps + 64)
    chosen = [DecodeCase(share, policy) for policy, share in wanted]
    with loading_bar() as progress:
        engine = Engine(source, config, progress=progress)
    with engine:
        _require_all_slots(engine.plan.num_slots, source.geometry.num_records)
        bench = DecodeBench(
            engine,
            replay,
            others.counts(source.geometry),
            shape=_case(shape, format_),
            context=context,
            num_steps=steps,
        )
        typer.echo(replay.note, err=True)
        _report(bench.run(chosen), rows, as_json=as_json)


def _check_lengths(*, context: int, most_context: int, steps: int) -> None:
    check_count("--context", context)
    check_count("--steps", steps)
    # With the steps before those that count.
    check_count("--most-context", most_context, least=context + steps + 64)


def _require_all_slots(num_slots: int, num_experts: int) -> None:
    if num_slots < num_experts:
        raise CapacityError(
            f"the plan has {num_slots} slots for {num_experts} experts, and this benchmark wants "
            "one for each",
            hint="raise `--vram`, lower `--most-context`, or cut the depth with `--layers`",
        )


def _cases(text: str) -> list[tuple[str, float]]:
    found = []
    for part in text.split(","):
        policy, _, share = part.partition(":")
        if policy not in ("half-life", "static", "random") or not share:
            raise ConfigError(
                f"`--cases` has `{part}`, which is not a policy and a share",
                hint="write `half-life:0.25,static:0.25,random:1`",
            )
        (number,) = _shares(share, "--cases")
        found.append((policy, number))
    return found


def _numbers(text: str, flag: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"`{flag}` is `{text}`, which is not a list of numbers", hint="write `0,0.5,1`"
        ) from error


def _shares(text: str, flag: str) -> list[float]:
    numbers = _numbers(text, flag)
    for number in numbers:
        if not 0 <= number <= 1:  # so that NaN fails too
            raise ConfigError(f"`{flag}` has a share of {number:g}, it must be in 0..1")
    return numbers


def _format(name: str) -> WeightFormat:
    if name not in USUAL:
        raise ConfigError(f"`--format {name}` is not one of {', '.join(USUAL)}")
    return USUAL[name]


def _case(shape: str, format_: str) -> str:
    """What rows call a model: its shape and, unless it is plain, its format."""
    return shape if format_ == "plain" else f"{shape} {format_}"


def _counts(text: str, flag: str) -> list[int]:
    numbers = _numbers(text, flag)
    for number in numbers:
        if not (number.is_integer() and 1 <= number <= MAX_TOKENS):
            raise ConfigError(f"`{flag}` has {number:g}, it must be whole numbers from 1 on")
    return [int(number) for number in numbers]


def _check_writable(file: Path | None) -> None:
    """Refuses a file that rows cannot go to, before anything is measured."""
    if file is None:
        return
    is_new = not file.exists()
    try:
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"`--rows {file}` cannot be written: {error.strerror}") from error


@contextmanager
def _smaller_shape_hint() -> Iterator[None]:
    """A benchmark has no plan, so what helps against too little memory is another shape."""
    try:
        yield
    except CapacityError as error:
        raise CapacityError(
            error.message, hint="cut the depth with `--layers`, or use `--shape tiny`"
        ) from error


def _report(rows: Iterable[Row], file: Path | None, *, as_json: bool) -> list[Row]:
    """Prints each row as it comes, then keeps them; returns them."""
    from hotset.bench.rows import append

    kept = []
    for row in rows:
        kept.append(row)
        if not as_json:
            typer.echo(_line(row))
    if as_json:
        typer.echo(json.dumps({"rows": [json.loads(row.to_json()) for row in kept]}))
    if file is not None:
        append(kept, file)
    return kept


def _line(row: Row) -> str:
    """A row for people."""
    against = "" if row.sol is None else f", speed of light {_with_unit(row.sol, row.unit)}"
    ratio = "" if row.ratio_to_sol is None else f" ({row.ratio_to_sol:.3f} of it)"
    return f"{row.case}: {row.figure} {_with_unit(row.p50, row.unit)}{against}{ratio}"


def _with_unit(number: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(number)
    # What is counted needs no second word, a share has none.
    return f"{number:.4g} {unit}" if unit not in ("share", "slots") else f"{number:.4g}"
