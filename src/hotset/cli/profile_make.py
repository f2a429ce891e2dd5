"""`hotset profile make`: runs texts through a model and writes what it routes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli.options import (
    Context,
    Device,
    Dtype,
    Json,
    KernelsOption,
    ModelArgument,
    PrefillChunk,
    Ram,
    Revision,
    Vram,
    check_count,
    engine_config,
)
from hotset.cli.outputs import check_apart, check_writable, whole_file
from hotset.cli.progress import loading_bar, token_bar
from hotset.cli.text import amount, read_text
from hotset.core.errors import ConfigError
from hotset.core.hit_curve import HitCurve
from hotset.core.profile import SUFFIXES, Profile
from hotset.core.trace import Trace

if TYPE_CHECKING:
    from hotset.core.config import EngineConfig
    from hotset.runtime.profiling import Excerpt
    from hotset.runtime.weights import CheckpointWeights

DEFAULT_WINDOW = 1024


def make(  # noqa: PLR0913 - one parameter for each flag
    model: ModelArgument,
    *,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="NAME", help="Profile to write, .npz or .json."),
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text file to run, its stem is the domain; may be repeated."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON-lines file: `prompt` or `messages`, perhaps `domain`."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens to generate behind each prompt, recorded too.")
    ] = 0,
    tokens: Annotated[
        int | None, typer.Option(help="Most tokens of each text, from its beginning.")
    ] = None,
    window: Annotated[
        int, typer.Option(help="Tokens of one sequence that a text is cut into.")
    ] = DEFAULT_WINDOW,
    keep_trace: Annotated[
        Path | None, typer.Option("--trace", help="Keep the recorded trace in this file.")
    ] = None,
    forecast: Annotated[
        bool, typer.Option(help="Fit the policy `forecast` too (.npz only).")
    ] = True,
    vram: Vram = None,
    ram: Ram = None,
    device: Device = None,
    dtype: Dtype = None,
    context: Context = None,
    prefill_chunk: PrefillChunk = None,
    kernels: KernelsOption = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Run texts through a model and write which experts they used.

    The profile is tied to the model by its shape and a hash of its router weights. No text and no
    token is stored.

    Example: `hotset profile make pocket --text notes.txt -o notes.npz`
    """
    path = output_path(output)
    config = engine_config(
        model,
        vram=vram,
        ram=ram,
        device=device,
        dtype=dtype,
        context=context,
        prefill_chunk=prefill_chunk,
        kernels=kernels,
        revision=revision,
    )
    check_count("--max-tokens", max_tokens, least=0)
    check_count("--tokens", tokens)
    check_count("--window", window)
    if not text and prompts is None:
        raise ConfigError("there is nothing to run", hint="give `--text FILE` or `--prompts FILE`")
    read = [*(("--text", file) for file in text or ()), ("--prompts", prompts)]
    check_apart({"--output": path, "--trace": keep_trace}, read)
    check_writable(keep_trace, flag="--trace")
    words = {file: read_text(file, flag="--text") for file in text or ()}
    lines = None if prompts is None else read_text(prompts, flag="--prompts")
    from hotset.runtime.profiling import cut_text, read_prompts
    from hotset.runtime.weights import CheckpointWeights

    source = CheckpointWeights(model, dtype=config.dtype, revision=config.revision)
    excerpts = [
        excerpt
        for file, content in words.items()
        for excerpt in cut_text(source.text, content, domain=file.stem, window=window, most=tokens)
    ]
    if prompts is not None and lines is not None:
        excerpts += read_prompts(source.text, prompts, lines, num_answer=max_tokens)
    files = [*words, *([prompts] if prompts else [])]
    with whole_file(keep_trace) as recorded:
        trace = record_texts(source, config, excerpts, recorded, files)
    counted = Profile.from_trace(trace, with_forecast=forecast and path.suffix == ".npz")
    profile = replace(counted, replay=HitCurve.from_trace(trace).replayed())
    save_profile(profile, path)
    _say_made(profile, trace, path, as_json=as_json)


def record_texts(
    source: CheckpointWeights,
    config: EngineConfig,
    excerpts: list[Excerpt],
    path: Path,
    files: list[Path],
) -> Trace:
    """Loads a model and runs excerpts through it, with progress on stderr.

    Args:
        path: of the trace file.
        files: that the excerpts are from; the trace keeps their names.
    """
    from hotset.runtime.engine import Engine
    from hotset.runtime.profiling import record_trace

    with loading_bar() as progress:
        engine = Engine(source, config, progress=progress)
    # Of a folder its name: where it lies is nobody's business.
    name = Path(config.model).name if Path(config.model).exists() else config.model
    total = sum(len(excerpt.ids) for excerpt in excerpts)
    with engine, token_bar("recording", total) as advance:
        return record_trace(
            engine,
            excerpts,
            path,
            name=name,
            source="; ".join(file.name for file in files),
            progress=advance,
        )


def output_path(path: Path) -> Path:
    """`NAME` is `NAME.npz`.

    Raises:
        ConfigError: another suffix, or no file that can be written; before anything is run.
    """
    if not path.name:  # what an empty word is as a path
        raise ConfigError("`--output` is no name of a file", hint="write `-o NAME.npz`")
    path = path if path.suffix else path.with_suffix(".npz")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"`--output` is `{path}`", hint=f"end it in {' or '.join(SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"`--output` is `{path}`, but there is no folder `{path.parent}`")
    check_writable(path, flag="--output")
    return path


def save_profile(profile: Profile, path: Path) -> None:
    try:
        profile.save(path)
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be written: {error.strerror}") from error


def _say_made(profile: Profile, trace: Trace, path: Path, *, as_json: bool) -> None:
    domains = [domain for domain in trace.domains if domain]
    data = {
        "profile": str(path),
        "model": profile.model,
        "tokens": profile.num_tokens,
        "sequences": profile.num_sequences,
        "domains": domains,
        "router_hash": profile.fingerprint.router_hash,
    }
    if as_json:
        typer.echo(json.dumps(data))
    else:
        typer.echo(
            f"{path}: {amount(profile.num_tokens, 'token')} in "
            f"{amount(profile.num_sequences, 'sequence')} of {', '.join(domains) or 'text'}"
        )
