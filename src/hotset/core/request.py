"""What one generation request asks for: sampling and length, validated here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hotset.core.errors import RequestError

# Below this every difference between logits that matters is infinite in float32; 0 is meant.
MIN_TEMPERATURE = 1e-6


class FinishReason(Enum):
    """Why a request ended; every request ends in exactly one."""

    STOP = "stop"  # a stop id was sampled
    LENGTH = "length"  # max_tokens or the context is used up
    CANCELLED = "cancelled"  # the caller went away
    FAILED = "failed"  # an error, which was reported


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most likely token (the lowest id among equals).
        top_p: nucleus, (0, 1]; 1 is off.
        top_k: keep the k most likely; 0 is off.
        min_p: drop what is less likely than this share of the most likely, [0, 1]; 0 is off.
        seed: of the random numbers; `None` takes a fresh one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        # Written so that NaN fails too.
        if not (self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature <= 100.0):
            raise RequestError(
                f"`temperature` is {self.temperature}, it must be 0 or in {MIN_TEMPERATURE}..100"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"`top_p` is {self.top_p}, it must be above 0 and at most 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise RequestError(f"`min_p` is {self.min_p}, it must be in 0..1")
        if not (isinstance(self.top_k, int) and self.top_k >= 0):
            raise RequestError(f"`top_k` is {self.top_k!r}, it must be 0 (off) or a whole number")
        seed = self.seed
        if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**63):
            raise RequestError(f"`seed` is {seed!r}, it must be a whole number in 0..2^63-1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def check_length(num_prompt: int, max_tokens: int | None, context_tokens: int) -> int:
    """How many tokens a request may generate.

    Args:
        num_prompt: tokens of the prompt.
        max_tokens: what was asked; `None` takes all that the context leaves.
        context_tokens: what the plan allows for prompt and answer together.

    Raises:
        RequestError: an empty prompt, a `max_tokens` below 1, or more than the context holds.
    """
    if num_prompt < 1:
        raise RequestError("the prompt has no tokens")
    if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 1):
        raise RequestError(f"`max_tokens` is {max_tokens!r}, it must be a whole number from 1 on")
    room = context_tokens - num_prompt
    if room < (max_tokens or 1):
        asked = "" if max_tokens is None else f" and {max_tokens} new ones"
        raise RequestError(
            f"{num_prompt} prompt tokens{asked} do not fit the context of {context_tokens}",
            hint="shorten the prompt, lower `max_tokens`, or load with a larger `--context`",
        )
    return max_tokens or room
