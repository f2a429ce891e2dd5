"""What requests look like, where speed decides: tokens of their prompts and of their answers.

    4096+512                      one kind of request
    8192+512,32768+256            two, that come equally often

Knows texts and rules of thumb; predicts nothing. Unless it is said, requests are assumed to be
short ones, or to use the context that was asked for: whoever sets a context means to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hotset.core.errors import ConfigError

# More than any model's context.
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Workload:
    """One kind of request.

    Attributes:
        prompt_tokens, answer_tokens: of one request.
    """

    prompt_tokens: int = 4096
    answer_tokens: int = 512

    def within(self, context_tokens: int) -> Workload:
        """The same in a context; where that is too short for both the prompt is at most half of it,
        the answer at most the rest."""
        if self.prompt_tokens + self.answer_tokens <= context_tokens:
            return self
        prompt = max(1, min(self.prompt_tokens, context_tokens // 2))
        return Workload(prompt, min(self.answer_tokens, context_tokens - prompt))


DEFAULT = Workload()


def parse_workload(text: str) -> tuple[Workload, ...]:
    """Kinds of requests as a user writes them, `PROMPT+ANSWER` with commas between.

    Raises:
        ConfigError: nothing of the kind, or tokens out of range.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\+(\d+)\s*", part, flags=re.ASCII)
        if match is None:
            raise ConfigError(
                f"`workload` is `{text}`, and `{part.strip()}` is not tokens of a prompt and an "
                "answer",
                hint="for example `4096+512`, or several with commas between",
                option="workload",
            )
        prompt, answer = (int(number) for number in match.groups())
        if not (1 <= prompt <= _MOST_TOKENS and 1 <= answer <= _MOST_TOKENS):
            raise ConfigError(
                f"`workload` has `{part.strip()}`, each number must be from 1 to {_MOST_TOKENS}",
                option="workload",
            )
        found.append(Workload(prompt, answer))
    return tuple(found)


def expected(said: tuple[Workload, ...], *, asked_context: int | None) -> tuple[Workload, ...]:
    """What a plan is made for, longest prompt first.

    Of a context that was asked for, prompts of a half, a quarter and an eighth come equally often,
    none of them shorter than what is expected where nothing was asked: nobody knows the length, and
    over octaves of it the best ring differs more than within one.

    Args:
        said: by the user; empty for nothing.
        asked_context: tokens; `None` where the context was left to auto.
    """
    if said:
        return tuple(sorted(set(said), key=lambda one: (-one.prompt_tokens, one.answer_tokens)))
    if asked_context is None:
        return (DEFAULT,)
    lengths = {max(DEFAULT.prompt_tokens, asked_context // part) for part in (2, 4, 8)}
    return tuple(Workload(length) for length in sorted(lengths, reverse=True))
