"""What a scheduler takes in and gives out: requests, events, counts, and its interface.

Plain data, so that a server can be written and tested without an engine. Knows ids and why an
answer ended; nothing of text, rows or how a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Protocol

from hotset.core.errors import HotsetError, RequestError
from hotset.core.request import FinishReason, SamplingParams, TokenLogprobs, TokenMatcher


@dataclass(frozen=True, kw_only=True)
class Request:
    """One answer that is asked for.

    Attributes:
        prompt_ids: at least one id.
        max_tokens: most tokens to generate; `None` goes on to the end of the context.
        sampling: how tokens are chosen; default greedy.
        stop_ids: ids that end the answer; the one that did is its last token.
        matcher: what the answer has to follow, for this request alone; it ends the answer where
            nothing can follow.
    """

    prompt_ids: Sequence[int]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    matcher: TokenMatcher | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happened to a request: a token, its end, or both at once.

    Attributes:
        request_id: what `submit` returned.
        token_id: the next token of the answer; `None` where it ends without one.
        logprobs: of that token, where the request asked for them.
        num_prefix_tokens: on the event of the first token, prompt tokens whose keys and values were
            reused from earlier requests.
        finish_reason: set on the last event of a request; each has exactly one such.
        error: why it failed; set with `FinishReason.FAILED` only.
    """

    request_id: int
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    num_prefix_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: HotsetError | None = None


@dataclass(frozen=True)
class TokenOut:
    """One generated token of a request that is answered alone.

    Attributes:
        token_id: its id. A stop id is put out too, marked by its finish reason.
        finish_reason: set on the last one.
    """

    token_id: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a scheduler does and has done since it was made.

    Attributes:
        num_running, num_waiting: requests that are being answered, and that wait for a row.
        num_finished: ended requests by reason.
        num_prompt_tokens, num_generated_tokens: taken in (reused ones included), and given out.
        num_prefix_tokens: prompt tokens whose keys and values were reused from earlier requests.
        num_steps: decode steps.
        decode_seconds: that these took, from one to the next where they came one after the other.
        num_prompt_layers: layers of prompts, each once for each prompt that it ran for; it grows
            while a long prompt is taken in.
        num_blocks, num_blocks_used: of the KV cache of full attention, and those that running
            requests hold; 0 where a model needs the library's own cache.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefix_tokens: int = 0
    num_steps: int = 0
    decode_seconds: float = 0.0
    num_prompt_layers: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0


def check_ids(token_ids: Sequence[int], vocab: int) -> list[int]:
    """A prompt's ids as plain numbers.

    Raises:
        RequestError: there are none, or one that is no whole number or not in the vocabulary.
    """
    try:
        ids = [index(token) for token in token_ids]
    except TypeError as error:
        raise RequestError(f"token ids must be whole numbers: {error}") from error
    if not ids:
        raise RequestError("the prompt has no tokens")
    for token in ids:
        if not 0 <= token < vocab:
            raise RequestError(f"token id {token} is outside the vocabulary of {vocab}")
    return ids


class Scheduling(Protocol):
    """Requests in, events out. One thread calls `step` in a loop; any thread may call the rest."""

    def submit(self, request: Request) -> int:
        """Takes a request in; its number.

        Raises:
            QueueFullError: too many wait already.
            RequestError: it is wrong, too long for the context, or no more are taken.
        """

    def cancel(self, request_id: int) -> None:
        """Ends a request with the next step, between two layers of its prompt at the latest; its
        memory is free then. A request that has ended stays as it is."""

    def step(self, early: Callable[[Event], None] | None = None) -> list[Event]:
        """Serves every running request once, or takes in a prompt; `[]` when there is nothing.

        Args:
            early: is given the events of running requests that are served between the layers of
                a prompt, as they happen; they are not in the list then.

        Raises:
            FatalError: the device failed for good. Every request has had its last event in the
                step before.
        """

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until there is something to do; whether there is. `timeout` in seconds."""

    def drain(self) -> None:
        """Takes no more requests; those that are here are answered to the end."""

    def close(self) -> None:
        """Ends what is left, as failed, with events in the next `step`. Safe to call twice."""

    def counts(self) -> Counts:
        """As of now."""
