"""`hotset plan`: prints the memory plan of a model on this machine, before a weight is read.

The plan goes to stdout as tables or JSON, whether it fits or not; one that does not fit raises,
which ends the command with exit code 2 and the reason on stderr.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import RenderableType

from hotset.cli.options import (
    BatchInvariant,
    Context,
    Device,
    Dtype,
    Json,
    KvDtype,
    KvTokens,
    Lossless,
    MaxBatch,
    ModelArgument,
    PrefillChunk,
    Ram,
    Revision,
    Vram,
    WorkloadOption,
    engine_config,
)
from hotset.cli.outputs import table_console
from hotset.cli.plan_table import plan_table
from hotset.cli.speed_table import sweep_rows, sweep_table
from hotset.core.config import EngineConfig
from hotset.core.errors import ConfigError
from hotset.core.fingerprint import ModelFingerprint
from hotset.core.geometry import ModelGeometry
from hotset.core.hardware import Machine
from hotset.core.hit_curve import HitCurve
from hotset.core.machine import MachineDescription, shipped_machines
from hotset.core.plan import MemoryPlan
from hotset.core.profile import Profile
from hotset.core.trace import load_trace


def plan(  # noqa: PLR0913 - one parameter for each flag
    model: ModelArgument,
    *,
    vram: Vram = None,
    ram: Ram = None,
    device: Device = None,
    dtype: Dtype = None,
    context: Context = None,
    prefill_chunk: PrefillChunk = None,
    workload: WorkloadOption = None,
    max_batch: MaxBatch = EngineConfig.max_batch,
    kv_tokens: KvTokens = None,
    kv_dtype: KvDtype = None,
    lossless: Lossless = False,
    batch_invariant: BatchInvariant = False,
    revision: Revision = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Plan for this machine instead: a file of `hotset doctor`, or a name in the "
            f"package ({', '.join(shipped_machines())})."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="Recorded routing of this model, for the predicted hit rate."),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Profile of this model, for the predicted hit rate.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Print slots and speed against the context as well.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print how much memory a model takes here, line by line, without loading it.

    Sizes that you set are kept or refused, the others are chosen and stated with their reason. Of a
    local folder the headers of all shards are checked, of a Hub id the config alone is read. The
    exit code is 0 when the plan fits and 2 when it does not.

    Speed is predicted where the machine's rates are known, from a trace or a profile of the model,
    else from the mean of other models. With `--machine` no GPU is needed.

    Example: `hotset plan Qwen/Qwen3-30B-A3B --vram 16GiB --context 32768`
    """
    config = engine_config(
        model,
        vram=vram,
        ram=ram,
        device=device,
        dtype=dtype,
        context=context,
        prefill_chunk=prefill_chunk,
        workload=workload,
        max_batch=max_batch,
        kv_tokens=kv_tokens,
        kv_dtype=kv_dtype,
        lossless=lossless,
        batch_invariant=batch_invariant,
        revision=revision,
    )
    described = _Described(config, machine=machine, trace=trace, profile=profile)
    on, result = described.plan()
    rows = described.sweep() if sweep else []
    if as_json:
        data = {
            "model": model,
            "weights_checked": described.weights_checked,
            "machine": on.to_dict(),
            **result.to_dict(),
            **({"sweep": sweep_rows(rows)} if sweep else {}),
        }
        typer.echo(json.dumps(data, indent=2))
    else:
        _print(plan_table(result, title=f"{model} on {on.device_name}"))
        if rows:
            _print(sweep_table(rows))
        if not described.weights_checked:
            typer.echo("weights not checked: only the config is read here")
    result.require_fit()


class _Described:
    """A model, a machine and what is known of its routing, ready to be planned.

    Raises:
        ConfigError: a machine, trace or profile that is not one, or not of this model.
    """

    def __init__(
        self, config: EngineConfig, *, machine: str | None, trace: str | None, profile: str | None
    ) -> None:
        self._description = None if machine is None else MachineDescription.load(machine)
        if self._description is not None and config.device is not None:
            raise ConfigError(
                "`--machine` says what device there is, `--device` does too",
                hint="leave `--device` out",
            )
        # This imports torch, which would make `--help` wait.
        from hotset.models.describe import describe

        described = describe(config.model, config.dtype, revision=config.revision)
        self.weights_checked = described.weights_checked
        self._geometry, self._config = described.geometry, config
        self._curve = hit_curve(described.geometry, config, trace=trace, profile=profile)

    def plan(self) -> tuple[Machine, MemoryPlan]:
        from hotset.runtime.planning import plan_engine

        return plan_engine(
            self._geometry, self._config, description=self._description, curve=self._curve
        )

    def sweep(self) -> list[MemoryPlan]:
        from hotset.runtime.planning import sweep_engine

        return sweep_engine(
            self._geometry, self._config, description=self._description, curve=self._curve
        )


def hit_curve(
    geometry: ModelGeometry, config: EngineConfig, *, trace: str | None, profile: str | None
) -> HitCurve | None:
    """Hits over slots of a trace or a profile, for as many rows as a step may have; `None` without
    either.

    Raises:
        ConfigError: both are given, one of another model, or a trace of fewer sequences than rows.
    """
    from hotset.runtime.planning import decoded_rows

    if trace is not None and profile is not None:
        raise ConfigError("give either `--trace` or `--profile`")
    num_rows = decoded_rows(geometry, config)
    if trace is not None:
        loaded = load_trace(trace)
        _check_model(geometry, loaded.info.fingerprint, f"trace `{trace}`")
        return HitCurve.from_trace(loaded, num_rows=num_rows)
    if profile is not None:
        counted = Profile.load(profile)
        _check_model(geometry, counted.fingerprint, f"profile `{profile}`")
        return HitCurve.from_profile(counted, num_rows=num_rows)
    return None


def _check_model(geometry: ModelGeometry, fingerprint: ModelFingerprint, name: str) -> None:
    differences = ModelFingerprint(
        architecture=geometry.model_type,
        num_experts=tuple(layer.num_experts for layer in geometry.layers),
        top_k=tuple(layer.top_k for layer in geometry.layers),
    ).differences(fingerprint)
    if differences:
        raise ConfigError(
            f"{name} is of another model: {', '.join(differences)}",
            hint="leave it out, or record one of this model",
        )


def _print(table: RenderableType) -> None:
    table_console().print(table)
