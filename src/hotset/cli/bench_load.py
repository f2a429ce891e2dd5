"""`hotset bench load`: flags of the benchmark of loading."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from hotset.cli.bench_options import Layers, Rows, Shape, case_name, check_writable, report
from hotset.cli.options import Device, Json, check_count
from hotset.core.errors import ConfigError

# Names of `bench.random_checkpoint.FORMATS`, which would import torch for a help text.
FORMATS = ("plain", "int4", "fp8", "nvfp4", "mxfp4")


def load(  # noqa: PLR0913 - one parameter for each flag
    *,
    shape: Shape = "qwen3-30b-a3b",
    format_: Annotated[
        str, typer.Option("--format", help=f"Format of experts' weights: {', '.join(FORMATS)}.")
    ] = "plain",
    layers: Layers = 2,
    device: Device = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where the checkpoint is written, and removed again: a disk, as /tmp may be none."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads that read. Default: as loading has them.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Of each measurement.")] = 3,
    rows: Rows = None,
    as_json: Json = False,
) -> None:
    """Write a random checkpoint and time loading its experts, against plain reads of the files.

    Example: `hotset bench load --format int4 --layers 4 --folder /var/tmp`
    """
    if format_ not in FORMATS:
        raise ConfigError(f"`--format {format_}` is not one of {', '.join(FORMATS)}")
    check_count("--layers", layers)
    check_count("--threads", threads)
    check_count("--repeats", repeats)
    check_writable(rows)
    if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"`--folder {folder}` is no folder that can be written to")
    from hotset.bench.load import LoadBench
    from hotset.bench.random_checkpoint import write_random_checkpoint
    from hotset.bench.shapes import shape_config
    from hotset.checkpoint.loader import default_threads
    from hotset.runtime.probe import choose_device

    where = choose_device(device)
    config = shape_config(shape, num_layers=layers)
    with tempfile.TemporaryDirectory(prefix="hotset-", dir=folder) as name:
        write_random_checkpoint(Path(name), config, weights=format_)
        bench = LoadBench(Path(name), device=where, num_threads=threads or default_threads())
        try:
            found = bench.run(case=f"{case_name(shape, format_)}, {layers} layers", repeats=repeats)
            report(found, rows, as_json=as_json)
        finally:
            bench.close()
