"""Flags of sampling, and what a request gets of them. What is not set is left to the checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hotset.cli.options import named_by_flag
from hotset.core.errors import ConfigError
from hotset.core.request import SamplingParams

_DEFAULT = "Default: the checkpoint's generation_config.json"

Temperature = Annotated[
    float | None, typer.Option(help=f"0..100; 0 is greedy. {_DEFAULT}, or greedy.")
]
TopP = Annotated[
    float | None,
    typer.Option(help=f"Nucleus sampling, above 0 to 1; 1 is off. {_DEFAULT}, or 1."),
]
TopK = Annotated[
    int | None, typer.Option(help=f"Keep the k likeliest; 0 is off. {_DEFAULT}, or 0.")
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop what is less likely than this share, 0..1, of the likeliest; 0 is off. "
        f"{_DEFAULT}, or 0."
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Makes sampling repeatable, from 0 on. Default: a fresh one.")
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(help="Taken off the logit of each token that the answer has, -2..2. Default: 0."),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(help="Taken off as often as the answer has the token, -2..2. Default: 0."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Makes tokens of prompt and answer less likely (above 1) or likelier (below); above "
        f"0 to 2, 1 is off. {_DEFAULT}, or 1."
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=BIAS",
        help="Add to the logit of a token id, -100..100; may be repeated.",
    ),
]


def chosen_sampling(
    *, logit_bias: list[str] | None = None, **given: float | None
) -> dict[str, Any]:
    """Fields of `SamplingParams` that were set on the command line.

    Raises:
        ConfigError: a value is wrong; the message names the flag.
    """
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if logit_bias:
        chosen["logit_bias"] = dict(_bias(entry) for entry in logit_bias)
    with named_by_flag():
        SamplingParams(**chosen)
    return chosen


def _bias(entry: str) -> tuple[int, float]:
    token, _, bias = entry.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise ConfigError(
            f"`--logit-bias {entry}` is not a token id and a number",
            hint="write `--logit-bias 42=-100`; `/tokenize` of a server gives the ids of a text",
        ) from error
