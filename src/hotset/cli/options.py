"""Flags that several commands share, spelled and explained once. Defaults are `EngineConfig`'s."""

from __future__ import annotations

from typing import Annotated

import typer

from hotset.core.config import EngineConfig
from hotset.core.units import parse_bytes

ModelArgument = Annotated[
    str, typer.Argument(help="Hub id, local folder, or `pocket` (inside the package).")
]
Vram = Annotated[
    str | None,
    typer.Option(help="Device memory for everything together, e.g. `8GiB`. Default: what is free."),
]
Ram = Annotated[
    str | None, typer.Option(help="Host memory that may be taken, e.g. `64GiB`. Default: free.")
]
Device = Annotated[
    str | None, typer.Option(help="`cuda` or `cpu`. Default: `cuda` where there is a GPU.")
]
Dtype = Annotated[
    str | None,
    typer.Option(help="`bfloat16`, `float16` or `float32`. Default: the checkpoint's own."),
]
Context = Annotated[
    int | None, typer.Option(help="Longest prompt and answer together, tokens. Default: what fits.")
]
PrefillChunk = Annotated[
    int | None, typer.Option(help="Most prompt tokens in one forward. Default: what fits.")
]
KernelsOption = Annotated[
    str | None,
    typer.Option("--kernels", help="Force `triton` or `reference`. Default: by the device."),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy", help="Who owns a slot: `half-life`, `lru` or `none`. Default: what fits."
    ),
]
HalfLifeOption = Annotated[
    float | None,
    typer.Option("--half-life", help="Steps after which a past use counts half. Default: 16."),
]
Graphs = Annotated[
    bool, typer.Option(help="Capture the decode step into one CUDA graph (on a GPU).")
]
Compiled = Annotated[
    bool, typer.Option(help="Fuse what surrounds experts and attention in it (on a GPU).")
]
Strict = Annotated[bool, typer.Option(help="Make every path that is not the planned one an error.")]


def engine_config(  # noqa: PLR0913 - one parameter for each shared flag
    model: str,
    *,
    vram: str | None = None,
    ram: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    context: int | None = None,
    prefill_chunk: int | None = None,
    kernels: str | None = None,
    revision: str | None = None,
    poison: bool = False,
    strict: bool = False,
) -> EngineConfig:
    """The config that these flags describe.

    Raises:
        ConfigError: a value is wrong; the message names the flag.
    """
    return EngineConfig(
        model=model,
        device=device,
        dtype=dtype,
        vram_bytes=None if vram is None else parse_bytes(vram, name="--vram"),
        ram_bytes=None if ram is None else parse_bytes(ram, name="--ram"),
        context_tokens=context,
        prefill_chunk=prefill_chunk,
        kernels=kernels,
        revision=revision,
        poison=poison,
        strict=strict,
    )
