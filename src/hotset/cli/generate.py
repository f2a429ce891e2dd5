"""`hotset generate`: loads a model and streams one answer to stdout. A thin layer over `load`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli.options import (
    Compiled,
    Context,
    Device,
    Dtype,
    Graphs,
    HalfLifeOption,
    Json,
    KernelsOption,
    ModelArgument,
    PolicyOption,
    PrefillChunk,
    Ram,
    Revision,
    Strict,
    Vram,
)
from hotset.cli.progress import loading_bar
from hotset.core.errors import ConfigError
from hotset.core.units import format_bytes

if TYPE_CHECKING:
    from hotset.api import Model, Stats, Token


def generate(  # noqa: PLR0913 - one parameter for each flag
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Argument(help="The prompt.")] = None,
    *,
    vram: Vram = None,
    ram: Ram = None,
    device: Device = None,
    dtype: Dtype = None,
    context: Context = None,
    prefill_chunk: PrefillChunk = None,
    kernels: KernelsOption = None,
    revision: Revision = None,
    strict: Strict = False,
    policy: PolicyOption = None,
    half_life: HalfLifeOption = None,
    graphs: Graphs = True,
    compiled: Compiled = True,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest; 0 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Share of the likeliest to keep.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt through the chat template.")
    ] = False,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a file, `-` for stdin.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate text: the answer streams to stdout, everything else goes to stderr.

    Example: `hotset generate Qwen/Qwen3-30B-A3B --vram 16GiB --chat "Why is the sky blue?"`
    """
    text = _prompt(prompt, prompt_file)
    from hotset import load

    with loading_bar() as progress:
        loaded = load(
            model,
            progress=progress,
            vram=vram,
            ram=ram,
            device=device,
            dtype=dtype,
            context=context,
            prefill_chunk=prefill_chunk,
            kernels=kernels,
            revision=revision,
            strict=strict,
            policy=policy,
            half_life=half_life,
            graphs=graphs,
            compiled=compiled,
        )
    source = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    with loaded as engine:
        tokens = engine.generate(
            **source,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
        )
        result = _run(tokens, echo=None if as_json else _write)
        stats = engine.stats
        if as_json:
            typer.echo(json.dumps({**result, "stats": stats.to_dict()}, ensure_ascii=False))
        else:
            typer.echo()
        _say_costs(engine, stats)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ConfigError(
            "give either a prompt or `--prompt-file`",
            hint='`hotset generate pocket "Once upon a time"`',
        )
    if prompt is not None:
        return prompt
    assert file is not None
    if str(file) == "-":
        return _decoded(sys.stdin.buffer.read(), "stdin")
    try:
        return _decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise ConfigError(f"`--prompt-file {file}` cannot be read: {error.strerror}") from error


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt in `{name}` is not UTF-8: {error}") from error


def _run(tokens: Iterator[Token], *, echo: Callable[[str], None] | None) -> dict[str, Any]:
    """Drains an answer; puts its text out as it comes where `echo` is given."""
    pieces, ids, reason = [], [], None
    for token in tokens:
        pieces.append(token.text)
        ids.append(token.token_id)
        reason = token.finish_reason
        if echo is not None:
            echo(token.text)
    assert reason is not None
    return {"text": "".join(pieces), "token_ids": ids, "finish_reason": reason.value}


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say_costs(model: Model, stats: Stats) -> None:
    plan = model.plan
    typer.echo(
        f"{stats.num_tokens} tokens at {stats.tokens_per_second:.1f} tokens/s "
        f"(first after {stats.first_token_seconds:.2f} s) | "
        f"hit rate {stats.hit_rate:.3f} | "
        f"{format_bytes(stats.link_bytes_per_token)} over the link per token | "
        f"{stats.num_slots} slots | "
        f"peak VRAM {format_bytes(stats.device_peak_bytes)}, "
        f"RSS {format_bytes(stats.host_peak_bytes)}",
        err=True,
    )
    host = f"host: planned {format_bytes(plan.host.total_bytes)}, "
    host += f"peak RSS {format_bytes(stats.host_peak_bytes)}"
    if stats.device_peak_bytes:
        host = (
            f"device: planned {format_bytes(plan.device.total_bytes)}, "
            f"peak {format_bytes(stats.device_peak_bytes)}; {host}"
        )
    typer.echo(host, err=True)
