"""`hotset bench load`: flags of the benchmark of loading."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from hotset.cli.bench_options import Layers, Rows, Shape, case_name, check_layers, report
from hotset.cli.options import Device, Json, check_count, named_by_flag
from hotset.cli.outputs import check_writable
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
    check_layers(layers)
    check_count("--threads", threads)
    check_count("--repeats", repeats)
    check_writable(rows, flag="--rows")
    from hotset.bench.load import LoadBench
    from hotset.bench.random_checkpoint import write_random_checkpoint
    from hotset.bench.shapes import shape_config
    from hotset.checkpoint.loader import default_threads
    from hotset.runtime.probe import choose_device

    with named_by_flag():
        where = choose_device(device)
    config = shape_config(shape, num_layers=layers)
    with _scratch(folder) as name:
        write_random_checkpoint(Path(name), config, weights=format_)
        bench = LoadBench(Path(name), device=where, num_threads=threads or default_threads())
        try:
            found = bench.run(case=f"{case_name(shape, format_)}, {layers} layers", repeats=repeats)
            report(found, rows, as_json=as_json)
        finally:
            bench.close()


def _scratch(folder: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Where the checkpoint goes; removed with it.

    Raises:
        ConfigError: nothing can be made there.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="hotset-", dir=folder)
    except OSError as error:
        raise ConfigError(
            f"`--folder {folder or tempfile.gettempdir()}` is no folder that can be written to: "
            f"{error.strerror}",
            hint="give one on the disk that is to be measured",
        ) from error
