"""What one generation request asks for: sampling and length, validated here and nowhere else.

Also what it gets back beside token ids. Knows no tokenizer and no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotset.core.errors import ContextLengthError, RequestError

# Below this every difference between logits that matters is infinite in float32; 0 is meant.
MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 100.0

# Limits of OpenAI's API, for the first two; of vLLM's for the third.
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_REPETITION_PENALTY = 2.0

# Alternatives beside the drawn token that a request may ask to see: as many as OpenAI's API gives.
MAX_TOP_LOGPROBS = 20


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
        presence_penalty: taken off the logit of each token that the answer has so far, -2..2
            (OpenAI's definition: the prompt does not count).
        frequency_penalty: taken off as often as the answer has the token, -2..2 (the same).
        repetition_penalty: the logit of each token of prompt or answer is divided by it where it
            is positive, multiplied where it is negative; above 0 to 2, 1 is off (Keskar et al.,
            "CTRL" (2019), as in transformers).
        logit_bias: token id -> added to its logit, -100..100, before any penalty.
        logprobs: report the logarithm of each token's probability, and of this many of the most
            likely ones beside it, 0..20. `None` reports nothing. Probabilities are the model's
            own, before anything of the above.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

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
        self._check_penalties()
        _check_logit_bias(self.logit_bias)
        num_top = self.logprobs
        if num_top is not None and not (_is_whole(num_top) and 0 <= num_top <= MAX_TOP_LOGPROBS):
            raise _wrong("logprobs", num_top, f"a whole number in 0..{MAX_TOP_LOGPROBS}")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= _number(self, name) <= MAX_PENALTY:
                raise _wrong(name, getattr(self, name), f"in -{MAX_PENALTY:g}..{MAX_PENALTY:g}")
        if not 0.0 < _number(self, "repetition_penalty") <= MAX_REPETITION_PENALTY:
            limits = f"above 0 and at most {MAX_REPETITION_PENALTY:g}"
            raise _wrong("repetition_penalty", self.repetition_penalty, limits)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are drawn from other logits than the model's own."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0.0, 0.0, 1.0) or bool(self.logit_bias)

    def check_vocab(self, vocab: int) -> None:
        """Refuses ids that a model does not have.

        Raises:
            RequestError: `logit_bias` names an id outside the vocabulary.
        """
        for token in self.logit_bias:
            if token >= vocab:
                raise RequestError(
                    f"`logit_bias` has token id {token}, the vocabulary has {vocab}",
                    option="logit_bias",
                )


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a drawn token was to the model.

    Attributes:
        logprob: natural logarithm of its probability.
        top: (token id, logprob) of the most likely ones, the likeliest first, the lower id first
            among equals; the drawn token is among them only if it is that likely.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


FREE_FOR_EVER = 2**31
"""More tokens than any answer has."""


class TokenMatcher(Protocol):
    """What a structured answer may go on with. Made for one request, and moved on by its tokens."""

    @property
    def num_free(self) -> int:
        """Tokens that may follow without being looked at one by one: none of them is forbidden,
        whatever they are. 0 where what follows depends on the last token."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow, so that the answer ends here."""

    def fill_mask(self, words_W: NDArray[np.int32]) -> None:
        """Writes what may come next: bit t % 32 of word t // 32 is set if token t may."""

    def accept(self, token_id: int) -> None:
        """Takes in the token that was drawn.

        Raises:
            RequestError: it was not allowed, or the structure has become too large to follow.
        """


def _number(params: SamplingParams, name: str) -> float:
    value: object = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, value, "a number")
    return value


def _check_logit_bias(logit_bias: object) -> None:
    wanted = f"a mapping of token ids to numbers in -{MAX_LOGIT_BIAS:g}..{MAX_LOGIT_BIAS:g}"
    if not isinstance(logit_bias, Mapping):
        raise _wrong("logit_bias", logit_bias, wanted)
    for token, bias in logit_bias.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        in_limits = is_number and -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS
        if not (_is_whole(token) and token >= 0 and in_limits):
            raise _wrong("logit_bias", {token: bias}, wanted)


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
        RequestError: an empty prompt, or a `max_tokens` below 1.
        ContextLengthError: more than the context holds.
    """
    if num_prompt < 1:
        raise RequestError("the prompt has no tokens")
    check_max_tokens(max_tokens)
    room = context_tokens - num_prompt
    if room < (max_tokens or 1):
        asked = "" if max_tokens is None else f" and {max_tokens} new ones"
        prompt = "1 prompt token" if num_prompt == 1 else f"{num_prompt} prompt tokens"
        raise ContextLengthError(
            f"{prompt}{asked} do not fit the context of {context_tokens}",
            hint="shorten the prompt, lower `max_tokens`, or load with a larger `--context`",
            num_prompt=num_prompt,
            num_new=max_tokens,
            context_tokens=context_tokens,
        )
    return max_tokens or room
