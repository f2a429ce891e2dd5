"""What one generation request asks for: sampling and length, validated here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hotset.core.errors import RequestError

# Below this every difference between logits that matters is infinite in float32; 0 is meant.
MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 100.0


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
        # Comparisons are written so that NaN fails too.
        heat, top_p, min_p = (_number(self, name) for name in ("temperature", "top_p", "min_p"))
        if not (heat == 0.0 or MIN_TEMPERATURE <= heat <= MAX_TEMPERATURE):
            limits = f"0 or in {MIN_TEMPERATURE}..{MAX_TEMPERATURE:g}"
            raise _wrong("temperature", heat, limits)
        if not 0.0 < top_p <= 1.0:
            raise _wrong("top_p", top_p, "above 0 and at most 1")
        if not 0.0 <= min_p <= 1.0:
            raise _wrong("min_p", min_p, "in 0..1")
        if not (_is_whole(self.top_k) and 0 <= self.top_k < 2**31):
            raise _wrong("top_k", self.top_k, "0 (off) or a whole number below 2^31")
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed < 2**63):
            raise _wrong("seed", self.seed, "a whole number in 0..2^63-1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _number(params: SamplingParams, name: str) -> float:
    value: object = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, value, "a number")
    return value


def _is_whole(value: object) -> bool:
    """`True` is 1 to Python, and nobody means it."""
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(name: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"`{name}` is {value!r}, it must be {wanted}", option=name)


def check_max_tokens(max_tokens: int | None) -> None:
    """Refuses what no request may ask for, whatever its prompt.

    Raises:
        RequestError: not a whole number from 1 on; `None` is no limit.
    """
    if max_tokens is not None and not (_is_whole(max_tokens) and max_tokens >= 1):
        raise _wrong("max_tokens", max_tokens, "a whole number from 1 on")


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
    check_max_tokens(max_tokens)
    room = context_tokens - num_prompt
    if room < (max_tokens or 1):
        asked = "" if max_tokens is None else f" and {max_tokens} new ones"
        prompt = "1 prompt token" if num_prompt == 1 else f"{num_prompt} prompt tokens"
        raise RequestError(
            f"{prompt}{asked} do not fit the context of {context_tokens}",
            hint="shorten the prompt, lower `max_tokens`, or load with a larger `--context`",
        )
    return max_tokens or room
