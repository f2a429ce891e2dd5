"""`hotset quantize`: writes a checkpoint with its routed experts in fewer bits."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
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
    with _ended_by_signals(), loading_bar("quantising experts") as moved:
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


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that it takes away what it has written.

    One that is ignored stays so, as under `nohup`. Outside the main thread, where Python sets no
    signals, all stay as they are.

    Raises:
        SystemExit: with 128 + the signal, as a shell gives for it.
    """
    ended: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not ended:  # another one must not break off the clearing up
            ended.append(number)
            raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: was for number, was in before.items() if was not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, end)
        yield
    except BaseException:
        if not ended:
            raise
        # Whatever came of it: after SIGHUP the terminal takes no words, of the bar's neither.
        with suppress(OSError):
            typer.echo(f"error: ended by {signal.Signals(ended[0]).name}", err=True)
        raise SystemExit(128 + ended[0]) from None
    finally:
        for number, was in before.items():
            signal.signal(number, was)
