"""Flags that several commands share, spelled and explained once. Defaults are `EngineConfig`'s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from hotset.core.config import MAX_TOKENS, EngineConfig
from hotset.core.errors import CapacityError, ConfigError, ContextLengthError, RequestError

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Hub id, local folder, or `pocket` (inside the package)."),
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
MaxBatch = Annotated[
    int,
    typer.Option(help="Most requests that are answered at the same time; the others wait."),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of KV cache for all of them together. Default: the longest context for one, "
        "and up to 4,096 tokens for each other."
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        help="`fp8` keeps keys and values in eight bits: half the KV cache, and slightly other "
        "answers. Default: as the model computes."
    ),
]
Lossless = Annotated[
    bool,
    typer.Option(
        "--lossless",
        help="Keep BF16 experts in 12 bits a weight, every bit of them: a third more of them in "
        "memory, and faster answers where most cross the link.",
    ),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        help="No bit of an answer depends on what is answered beside it. Each request then runs "
        "its own steps, which is slower for several."
    ),
]
PrefixReuse = Annotated[
    bool,
    typer.Option(
        help="Keep what prompts and answers left in the KV cache, for requests that begin alike. "
        "Low bits may depend on what was reused, unless `--batch-invariant`."
    ),
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="PROMPT+ANSWER,...",
        help="Requests to be fast for, in tokens: `32768+256`. Default: prompts of a half, a "
        "quarter and an eighth of `--context`, from 4,096 tokens on, and answers of 512.",
    ),
]
PrefillShare = Annotated[
    float,
    typer.Option(
        help="Share of their rate that running answers give up for a long prompt, above 0 to 1."
    ),
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
        "--policy",
        help="Who owns a slot: `half-life`, `lru` or `none`; with `--profile` also "
        "`static-uniform`, `static-global` or `forecast`. Default: `half-life` where slots are "
        "fewer than experts.",
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", help="Which experts such text uses, a file of `hotset profile`."),
]
RecordOption = Annotated[
    Path | None,
    typer.Option("--record", help="Record which experts are used, no text, into a trace file."),
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


def engine_config(model: str, **options: Any) -> EngineConfig:
    """The config that these flags describe, each under the option's own name.

    Raises:
        ConfigError: a value is wrong; the message names the flag.
    """
    with named_by_flag():
        return EngineConfig.from_options(model, **options)


@contextmanager
def named_by_flag() -> Iterator[None]:
    """Calls a wrong option what it is on a command line: `top_p` is `--top-p`.

    Raises:
        ConfigError: for a wrong request too: on a command line its parameters are flags.
        CapacityError: for a request that is longer than the context.
    """
    try:
        yield
    except ContextLengthError as error:
        hint = "shorten the prompt, lower `--max-tokens`, or raise `--context`"
        raise CapacityError(error.message, hint=hint) from error
    except (ConfigError, RequestError) as error:
        if error.option is None and isinstance(error, ConfigError):
            raise
        message = error.message
        if error.option is not None:
            flag = f"`--{error.option.replace('_', '-')}`"
            message = message.replace(f"`{error.option}`", flag)
        raise ConfigError(message, hint=error.hint) from error


def check_count(flag: str, value: int | None, *, least: int = 1, most: int = MAX_TOKENS) -> None:
    """Refuses a count that is too small or too large, by default larger than anything that is
    counted here; `None` passes.

    Raises:
        ConfigError: names the flag.
    """
    if value is not None and value < least:
        raise ConfigError(f"`{flag}` is {value}, the least is {least}")
    if value is not None and value > most:
        raise ConfigError(f"`{flag}` is {value}, the most is {most}")
