"""`hotset simulate`: hit rates of policies and slot counts on a recorded trace.

Turns flags into conditions and results into a table, JSON or a picture; the replay is
`core.simulator`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hotset.cli.lists import read_numbers, read_shares
from hotset.cli.options import Device, Dtype, Ram, Revision, Vram, check_count, named_by_flag
from hotset.cli.outputs import check_apart, check_writable
from hotset.cli.simulate_model import DEFAULT_TOKENS, DEFAULT_WINDOW, find_trace
from hotset.cli.simulate_output import print_results, to_rows
from hotset.core.config import check_choice
from hotset.core.costmodel import predict_step
from hotset.core.errors import ConfigError
from hotset.core.geometry import ModelGeometry
from hotset.core.half_life import best_half_life
from hotset.core.machine import MachineDescription
from hotset.core.policy import (
    MAX_EXPERTS,
    MAX_VICTIMS,
    NUM_VICTIMS,
    ForecastPolicy,
    HalfLife,
    Lru,
    StaticGlobal,
    StaticUniform,
)
from hotset.core.profile import Profile
from hotset.core.simulator import (
    BELADY,
    HINDSIGHT,
    NEEDS_PROFILE,
    Condition,
    Result,
)
from hotset.core.simulator import (
    simulate as run_simulation,
)
from hotset.core.trace import PARITIES, Trace

DEFAULT_SLOTS = "0.125,0.25,0.5"
# The engine's wishes are a step late at most; each step more is one more copy of them.
_MOST_LAG = 64
DEFAULT_HALF_LIVES = "4,8,16,32,64,128"
DEFAULT_POLICIES = (
    *(StaticUniform.name, StaticGlobal.name, Lru.name, HalfLife.name, ForecastPolicy.name),
    *(HINDSIGHT, BELADY),
)
NO_PROFILE = "none"
PREDICTED_CONTEXT = 4096
"""Tokens in the cache for which speed is predicted."""


def simulate(  # noqa: PLR0913 - one parameter for each flag
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE|MODEL",
            help="Trace file, .npz archive of expert ids, or `pocket`; with `--text` a model.",
        ),
    ],
    *,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Run MODEL on this text, record it, replay that; may be repeated."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help=f"Most tokens of each text.  [default: {DEFAULT_TOKENS}]"),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help=f"Tokens of one sequence of it.  [default: {DEFAULT_WINDOW}]"),
    ] = None,
    keep_trace: Annotated[
        Path | None, typer.Option("--trace", help="Keep the recorded trace in this file.")
    ] = None,
    vram: Vram = None,
    ram: Ram = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    slots: Annotated[
        str, typer.Option(help="Fractions of the experts that have a slot, separated by commas.")
    ] = DEFAULT_SLOTS,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"May be repeated. Default: {', '.join(DEFAULT_POLICIES)}."),
    ] = None,
    half_life: Annotated[
        str, typer.Option(help="Half-lives in steps, separated by commas; `inf` never forgets.")
    ] = DEFAULT_HALF_LIVES,
    domain: Annotated[
        list[str] | None, typer.Option(help="Replay this domain only; may be repeated.")
    ] = None,
    sequences: Annotated[
        str, typer.Option(help=f"Sequences to replay by number: {', '.join(PARITIES)}.")
    ] = "even",
    profile_from: Annotated[
        str,
        typer.Option(
            help="What static sets and the forecast know: `odd`, `even` or `all` sequences of "
            "all domains, a profile file, or `none`."
        ),
    ] = "odd",
    prior_weight: Annotated[
        float, typer.Option(help="Weight of that profile in `half-life`, 0 for none.")
    ] = 0.0,
    victims: Annotated[
        int, typer.Option(help="Residents per layer that a step may give up.")
    ] = NUM_VICTIMS,
    wish_lag: Annotated[
        int, typer.Option(help="Steps that the wishes are late; the engine's are 0 or 1.")
    ] = 0,
    experts: Annotated[
        int | None, typer.Option(help="Experts per layer, where the file does not say.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit rate over slots into a .png or .svg file.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Predict tokens/s on this machine: a file of `hotset doctor`, or a name."
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Of this published shape; with `--text` it is the model's own."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a trace and print the hit rate of each policy and number of slots.

    Uses the engine's own policies. State is kept from one sequence to the next, as in a server.
    Without a trace, `--text` records a short one first.

    Example: `hotset simulate pocket --slots 0.25,0.5 --policy lru --policy half-life`
    """
    if plot is not None:
        from hotset.cli.plotting import check_plot_path

        check_plot_path(plot)
    _check_prediction(machine, shape, is_model=bool(text))
    check_count("--experts", experts, most=MAX_EXPERTS)
    check_count("--victims", victims, most=MAX_VICTIMS)
    check_count("--wish-lag", wish_lag, least=0, most=_MOST_LAG)
    with named_by_flag():
        check_choice("sequences", sequences, PARITIES)
    shares, half_lives = (
        read_shares(slots, "--slots"),
        read_numbers(half_life, "--half-life", example="8,16"),
    )
    check_apart({"--trace": keep_trace, "--plot": plot}, [("--text", file) for file in text or ()])
    check_writable(keep_trace, flag="--trace")
    described = None if machine is None else MachineDescription.load(machine)
    of_shape = None if shape is None else shape_geometry(shape)
    found = find_trace(
        trace,
        num_experts=experts,
        num_wanted=2 if "odd" in (sequences, profile_from) else 1,
        texts=text or [],
        tokens=tokens,
        window=window,
        keep=keep_trace,
        vram=vram,
        ram=ram,
        device=device,
        dtype=dtype,
        revision=revision,
    )
    whole = found.trace
    wants_forecast = not policy or ForecastPolicy.name in policy
    profile = _profile(whole, profile_from, with_forecast=wants_forecast)
    conditions = _conditions(
        policies=list(dict.fromkeys(policy)) if policy else _default_policies(profile),
        slots=shares,
        half_lives=half_lives,
        prior_weight=prior_weight,
    )
    replayed = whole.select(parity=sequences, domains=tuple(domain or ()))
    results = _run(replayed, conditions, profile, num_victims=victims, wish_lag=wish_lag)
    choices = best_half_life(results)
    speeds = None
    geometry = found.geometry or of_shape
    if described is not None and geometry is not None:
        speeds = tokens_per_second(results, machine=described, geometry=geometry)
    if plot is not None:
        from hotset.cli.simulate_plot import draw

        draw(results, plot, title=_title(replayed))
    if as_json:
        typer.echo(json.dumps(to_rows(results, choices, replayed, speeds), indent=2))
    else:
        print_results(results, choices, title=_title(replayed), speeds=speeds)


def _check_prediction(machine: str | None, shape: str | None, *, is_model: bool) -> None:
    if is_model and shape is not None:
        raise ConfigError(
            "`--shape` is of a trace's model, and with `--text` the model's own is taken",
            hint="leave `--shape` out",
        )
    if not is_model and (machine is None) != (shape is None):
        raise ConfigError("a prediction needs both `--machine` and `--shape`")


def shape_geometry(shape: str) -> ModelGeometry:
    """Of a published shape.

    Raises:
        ConfigError: there is none of that name.
    """
    # These import torch, which would make `--help` wait.
    from hotset.bench.shapes import shape_config
    from hotset.models.geometry import build_meta

    return build_meta(shape_config(shape)).geometry


def tokens_per_second(
    results: list[Result], *, machine: MachineDescription, geometry: ModelGeometry
) -> list[float]:
    """What each result is worth: decoding with 4,096 tokens in the cache, every layer at the
    result's hit rate.

    Raises:
        ConfigError: the machine lacks a rate.
    """
    rates = machine.rates(record_bytes=geometry.layers[0].expert.record_bytes)
    used = [float(layer.top_k) for layer in geometry.layers]
    steps = (
        predict_step(
            geometry,
            rates,
            hit_rates=[result.hit_rate] * len(used),
            used=used,
            context_tokens=PREDICTED_CONTEXT,
        )
        for result in results
    )
    return [1e3 / step.total_ms for step in steps]


def _title(trace: Trace) -> str:
    inferred = " (from the highest id seen)" if trace.info.inferred else ""
    return (
        f"{trace.info.model}: {trace.num_layers} layers, {trace.max_experts} experts{inferred}, "
        f"{len(trace.sequences)} sequences, {trace.num_tokens:,} tokens"
    )


def _profile(trace: Trace, profile_from: str, *, with_forecast: bool) -> Profile | None:
    if profile_from == NO_PROFILE:
        return None
    if profile_from in PARITIES:
        return Profile.from_trace(trace.select(parity=profile_from), with_forecast=with_forecast)
    profile = Profile.load(profile_from)
    profile.check_fits(trace.info.fingerprint, name=f"profile `{profile_from}`")
    return profile


def _default_policies(profile: Profile | None) -> list[str]:
    """All of them, without those whose knowledge the profile does not have."""
    missing = set(NEEDS_PROFILE) if profile is None else set()
    if profile is not None and profile.forecast is None:
        missing.add(ForecastPolicy.name)
    return [name for name in DEFAULT_POLICIES if name not in missing]


def _conditions(
    *, policies: list[str], slots: list[float], half_lives: list[float], prior_weight: float
) -> list[Condition]:
    conditions = []
    for name in policies:
        for fraction in slots:
            if name == HalfLife.name:
                conditions += [
                    Condition(name, fraction, half_life, prior_weight) for half_life in half_lives
                ]
            else:
                conditions.append(Condition(name, fraction))
    return conditions


def _run(
    trace: Trace,
    conditions: list[Condition],
    profile: Profile | None,
    *,
    num_victims: int,
    wish_lag: int,
) -> list[Result]:
    from rich.console import Console

    with named_by_flag(), Console(stderr=True).status("replaying") as status:
        return run_simulation(
            trace,
            conditions,
            prior_LE=None if profile is None else profile.prior,
            forecast=None if profile is None else profile.forecast,
            num_victims=num_victims,
            wish_lag=wish_lag,
            progress=lambda name: status.update(f"replaying {trace.num_tokens:,} tokens: {name}"),
        )
