"""`hotset plan`: prints the memory plan of a model on this machine, before a weight is read.

The plan goes to stdout as tables or JSON, whether it fits or not; one that does not fit raises,
which ends the command with exit code 2 and the reason on stderr.
"""

from __future__ import annotations

import json

import typer

from hotset.cli.options import (
    Context,
    Device,
    Dtype,
    Json,
    ModelArgument,
    PrefillChunk,
    Ram,
    Revision,
    Vram,
    engine_config,
)
from hotset.core.config import EngineConfig
from hotset.core.hardware import Machine
from hotset.core.plan import MemoryPlan


def plan(  # noqa: PLR0913 - one parameter for each flag
    model: ModelArgument,
    *,
    vram: Vram = None,
    ram: Ram = None,
    device: Device = None,
    dtype: Dtype = None,
    context: Context = None,
    prefill_chunk: PrefillChunk = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Print how much memory a model takes here, line by line, without loading it.

    Sizes that you set are kept or refused, the others are chosen and stated with their reason. Of a
    local folder the headers of all shards are checked, of a Hub id the config alone is read. The
    exit code is 0 when the plan fits and 2 when it does not.

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
        revision=revision,
    )
    weights_checked, machine, result = _make(config)
    if as_json:
        data = {
            "model": model,
            "weights_checked": weights_checked,
            "machine": machine.to_dict(),
            **result.to_dict(),
        }
        typer.echo(json.dumps(data, indent=2))
    else:
        _print(result, title=f"{model} on {machine.device_name}")
        if not weights_checked:
            typer.echo("weights not checked: only the config is read here")
    result.require_fit()


def _make(config: EngineConfig) -> tuple[bool, Machine, MemoryPlan]:
    # These import torch, which would make `--help` wait.
    from hotset.models.describe import describe
    from hotset.runtime.planning import plan_engine

    described = describe(config.model, config.dtype, revision=config.revision)
    return described.weights_checked, *plan_engine(described.geometry, config)


def _print(result: MemoryPlan, *, title: str) -> None:
    from rich.console import Console

    from hotset.cli.plan_table import plan_table

    Console().print(plan_table(result, title=title))
