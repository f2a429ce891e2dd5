"""Where `hotset simulate` gets a trace: a file, or a model that is run on texts first.

Knows flags and files; how a model is recorded is `runtime/profiling`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset.cli.options import check_count, engine_config
from hotset.cli.outputs import whole_file
from hotset.cli.profile_make import record_texts
from hotset.cli.text import read_text
from hotset.core.errors import CheckpointError, ConfigError
from hotset.core.geometry import ModelGeometry
from hotset.core.trace import POCKET, Trace, load_trace

# Short: a minute's work for most models on a CPU, and enough for 0.01 (see `core.hit_curve`).
DEFAULT_TOKENS = 4096
# Of one sequence: sixteen of them, of which half are replayed and half known beforehand.
DEFAULT_WINDOW = 256


@dataclass(frozen=True)
class Recording:
    """What is replayed.

    Attributes:
        trace: all of it.
        geometry: of the model that was run; `None` of a file, which does not have it.
    """

    trace: Trace
    geometry: ModelGeometry | None = None


def find_trace(
    name: str,
    *,
    num_experts: int | None,
    num_wanted: int,
    texts: list[Path],
    tokens: int | None,
    window: int | None,
    keep: Path | None,
    **options: Any,
) -> Recording:
    """Reads a trace, or with texts runs the model of that name on them.

    Args:
        num_experts: of a layer, where a file does not say.
        num_wanted: sequences that there must be at least.
        tokens: most of each text; default `DEFAULT_TOKENS`.
        window: tokens of one sequence; default `DEFAULT_WINDOW`.
        keep: file for the recorded trace; it is forgotten otherwise.
        options: of the engine, by the names of their flags; `None` where not given.

    Raises:
        CheckpointError: no such trace or model.
        ConfigError: flags that only mean something with the other of the two; too few sequences,
            of a text before the model is run on it.
    """
    if texts:
        if num_experts is not None:
            raise ConfigError("`--experts` is for trace files, a model knows its own")
        return _record(
            name,
            {file: read_text(file, flag="--text") for file in texts},
            tokens=DEFAULT_TOKENS if tokens is None else tokens,
            window=DEFAULT_WINDOW if window is None else window,
            num_wanted=num_wanted,
            keep=keep,
            options=options,
        )
    for_models = {"tokens": tokens, "window": window, "trace": keep, **options}
    for flag, value in for_models.items():
        if value is not None:
            raise ConfigError(
                f"`--{flag}` is for running a model, and without `--text` a trace is read",
                hint="give `--text FILE` to run the model on, or leave it out",
            )
    try:
        trace = load_trace(name, num_experts=num_experts)
    except CheckpointError as error:
        if name == POCKET or Path(name).is_file():
            raise
        hint = f"{error.hint}; of a model, give a text to run: `--text FILE`"
        raise CheckpointError(error.message, hint=hint) from error
    _check_enough(len(trace.sequences), num_wanted)
    return Recording(trace)


def _check_enough(num_sequences: int, num_wanted: int) -> None:
    if num_sequences < num_wanted:
        raise ConfigError(
            f"there is {num_sequences} sequence, and `odd` ones begin with the second",
            hint="`--sequences all --profile-from none` takes what is there; a longer `--text`, or "
            "a shorter `--window`, makes more of them",
        )


def _record(
    name: str,
    words: dict[Path, str],
    *,
    tokens: int,
    window: int,
    num_wanted: int,
    keep: Path | None,
    options: dict[str, Any],
) -> Recording:
    check_count("--tokens", tokens)
    check_count("--window", window)
    config = engine_config(name, **options)
    # These import torch, which would make `--help` wait.
    from hotset.runtime.profiling import cut_text
    from hotset.runtime.weights import CheckpointWeights

    source = CheckpointWeights(name, dtype=config.dtype, revision=config.revision)
    excerpts = [
        excerpt
        for file, content in words.items()
        for excerpt in cut_text(source.text, content, domain=file.stem, window=window, most=tokens)
    ]
    _check_enough(len(excerpts), num_wanted)
    with whole_file(keep) as recorded:
        trace = record_texts(source, config, excerpts, recorded, list(words))
    return Recording(trace, source.geometry)
