"""`hotset quantize`: writes a checkpoint with its routed experts in fewer bits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hotset.cli.options import Json, ModelArgument, Revision
from hotset.cli.progress import loading_bar
from hotset.core.errors import ConfigError
from hotset.core.units import format_bytes

# Names of `checkpoint.rtn.TARGETS`, which would import torch for a help text.
FORMATS = ("int4", "fp8", "nvfp4", "mxfp4")

CALIBRATED = (
    "rounded to the nearest value without looking at data; where somebody publishes this model "
    "with calibrated quantisation, that one answers better"
)


def quantize(
    model: ModelArgument,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; new or empty.")],
    format_: Annotated[
        str, typer.Option("--format", help="`int4`, `fp8`, `nvfp4` or `mxfp4`.")
    ] = "int4",
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Quantise the routed experts of a checkpoint, in the layout of compressed-tensors.

    Each value goes to the nearest code and no data is looked at: calibrated quantisation by others
    is better. All other weights stay as they are.

    Example: `hotset quantize Qwen/Qwen3-30B-A3B --format int4 -o qwen3-30b-a3b-int4`
    """
    if format_ not in FORMATS:
        raise ConfigError(f"`--format {format_}` is not one of {', '.join(FORMATS)}")
    from hotset.checkpoint.rtn import TARGETS
    from hotset.checkpoint.shrink import shrink
    from hotset.checkpoint.source import resolve_model
    from hotset.models.describe import read_keys
    from hotset.models.geometry import build_meta, read_config

    folder = resolve_model(model, revision)
    keys = read_keys(folder, build_meta(read_config(folder)))
    with loading_bar("quantising experts") as moved:
        shrunk = shrink(folder, keys, TARGETS[format_], output, progress=moved)
    if as_json:
        typer.echo(json.dumps({"output": str(output), "format": format_, **asdict(shrunk)}))
        return
    typer.echo(
        f"{output}: {shrunk.num_matrices} expert matrices in {format_}, "
        f"{format_bytes(shrunk.num_bytes)} of weights instead of "
        f"{format_bytes(shrunk.source_bytes)}"
    )
    typer.echo(CALIBRATED, err=True)
