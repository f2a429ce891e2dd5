"""`hotset bench decode`: flags into cases, rows out of them, and their picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
from hotset.cli.lists import read_counts
from hotset.cli.options import Device, Json, Vram, check_count, engine_config
from hotset.cli.outputs import check_writable
from hotset.cli.plotting import check_plot_path
from hotset.cli.progress import loading_bar
from hotset.core.config import MAX_BATCH
from hotset.core.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from hotset.bench.random_weights import RandomWeights
    from hotset.bench.replay import Replay
    from hotset.core.config import EngineConfig
    from hotset.core.geometry import ModelGeometry
    from hotset.core.policy import FloatArray
    from hotset.runtime.engine import Engine


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
    policies: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Policies side by side; `half-life:64` says how many steps, `random` is a fixed "
            "random set. No cache is always measured.",
        ),
    ] = "static-uniform,static-global,lru,half-life:16,half-life:64",
    slots: Annotated[
        str,
        typer.Option(
            metavar="SIZES",
            help="Shares of the experts that have a slot, 0..1, or budgets of device memory for "
            "everything together, e.g. `16GiB`.",
        ),
    ] = "0.25,0.5",
    batch: Annotated[str, typer.Option(metavar="COUNTS", help="Rows of a step.")] = "1",
    context: Annotated[int, typer.Option(help="Tokens in the cache of a row at the start.")] = 1024,
    most_context: Annotated[int, typer.Option(help="Room of the cache, tokens.")] = 33000,
    steps: Annotated[int, typer.Option(help="Steps that count.")] = 256,
    offload_layers: Annotated[
        int, typer.Option(help="Layers of the comparison with accelerate; 0 leaves it out.")
    ] = 4,
    plot: Annotated[
        Path | None, typer.Option(help="Draw tokens/s over slots: a .png or .svg file.")
    ] = None,
    rows: Rows = None,
    as_json: Json = False,
) -> None:
    """Time whole decode steps with routing replayed from a trace, by slots, policy and batch.

    Even texts of the trace are replayed, odd ones are what policies know beforehand. Needs room
    for every expert on the device; a case gives slots to only a share of them.

    Example: `hotset bench decode moe-54m.npz --policies half-life,lru --slots 0.25,16GiB`
    """
    from hotset.bench.decode_cases import PolicyChoice, make_cases
    from hotset.bench.decode_run import SETTLE_STEPS

    choices = [PolicyChoice.parse(part) for part in policies.split(",")]
    batches = read_counts(batch, "--batch")
    check_layers(layers)
    check_count("--offload-layers", offload_layers, least=0)
    tokens = steps + 2 * SETTLE_STEPS  # of each row: those that do not count, and some to spare
    _check_lengths(batches, context=context, most_context=most_context, steps=steps, tokens=tokens)
    check_writable(rows, flag="--rows")
    if plot is not None:
        check_plot_path(plot)
    config = engine_config(
        f"random {shape}",
        vram=vram,
        device=device,
        context=most_context,
        max_batch=max(batches),
        kv_tokens=max(most_context, max(batches) * (context + tokens)),
    )
    from hotset.bench.decode import DecodeBench
    from hotset.bench.random_weights import RandomWeights
    from hotset.bench.shapes import shape_config

    source = RandomWeights(shape_config(shape, num_layers=layers), weights=weight_format(format_))
    replay, prior_LE = _replay(trace, source.geometry, num_tokens=tokens, num_rows=max(batches))
    name = case_name(shape, format_)
    if replay.distortion:
        name += f" ({replay.distortion})"
    engine, shares = _load(source, config, slots)
    cases = make_cases(choices, shares)
    with engine:
        bench = DecodeBench(
            engine,
            replay,
            prior_LE,
            shape=name,
            context=context,
            num_steps=steps,
        )
        typer.echo(replay.note, err=True)
        found = report(
            bench.run(cases, batches, offload_layers=offload_layers), rows, as_json=as_json
        )
    if plot is not None:
        from hotset.cli.decode_plot import draw

        draw(found, plot, title=f"{name}, {context} tokens of context")


def _replay(
    trace: Path, geometry: ModelGeometry, *, num_tokens: int, num_rows: int
) -> tuple[Replay, FloatArray]:
    """Routing of the even texts, and what the odd ones say beforehand."""
    from hotset.bench.replay import map_profile, map_trace
    from hotset.core.trace import load_trace

    recorded = load_trace(trace)
    even, odd = recorded.select(parity="even"), recorded.select(parity="odd")
    replay = map_trace(even, geometry, num_tokens=num_tokens, num_rows=num_rows)
    return replay, map_profile(odd, geometry)


def _load(source: RandomWeights, config: EngineConfig, slots: str) -> tuple[Engine, list[float]]:
    """An engine with a slot for every expert, and the shares that `--slots` asks for."""
    from hotset.bench.decode_cases import parse_slots
    from hotset.runtime.engine import Engine
    from hotset.runtime.planning import plan_engine

    if reason := source.geometry.attention_reason:
        raise ConfigError(f"this shape does not run over a KV pool, which is timed here: {reason}")
    planned = plan_engine(source.geometry, config)
    plan = planned[1].require_fit()
    _require_all_slots(plan.num_slots, source.geometry.num_records)
    shares = parse_slots(slots, plan, source.geometry)
    with loading_bar() as progress:
        return Engine(source, config, planned=planned, progress=progress), shares


def _check_lengths(
    batches: list[int], *, context: int, most_context: int, steps: int, tokens: int
) -> None:
    check_count("--context", context)
    check_count("--steps", steps)
    check_count("--most-context", most_context, least=context + tokens)
    if max(batches) > MAX_BATCH:
        raise ConfigError(f"`--batch` has {max(batches)}, the most is {MAX_BATCH}")


def _require_all_slots(num_slots: int, num_experts: int) -> None:
    if num_slots < num_experts:
        raise CapacityError(
            f"the plan has {num_slots} slots for {num_experts} experts, and this benchmark wants "
            "one for each",
            hint="raise `--vram`, lower `--most-context`, or cut the depth with `--layers`",
        )
