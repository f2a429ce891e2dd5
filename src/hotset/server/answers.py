"""From tokens to the parts of answers: text, stop strings, reasoning and calls, and how each ends.

`Choice` is one answer and pure; `Answers` are those of one HTTP request, with their queue. Knows no
wire format.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace

from hotset.core.request import FinishReason
from hotset.runtime.requests import Event, Request
from hotset.server.ask import Finish, Part, TokenInfo, ToolPart, Usage, Whole
from hotset.server.engine_loop import EngineLoop, Ticket
from hotset.server.errors import HttpError, Problem, failed_in_a_step
from hotset.server.speech import AnswerText, Piece, Speech

logger = logging.getLogger(__name__)


class Choice:
    """One answer.

    Args:
        index: its place among the choices.
        text: makes text of its tokens.
        speech: tells reasoning and calls from what is said.
        stop_ids: ids that end it and are not part of its text.
        with_logprobs: whether its parts have their tokens.
        parallel_calls: whether it may have more than one call; if not, it ends before the second.
    """

    def __init__(
        self,
        index: int,
        *,
        text: AnswerText,
        speech: Speech,
        stop_ids: frozenset[int],
        with_logprobs: bool,
        parallel_calls: bool,
    ) -> None:
        self._index, self._text, self._speech = index, text, speech
        self._stop_ids = stop_ids
        self._with_logprobs, self._parallel = with_logprobs, parallel_calls
        self._num_calls = 0
        self.num_tokens = self.num_reasoning_tokens = 0
        self.ended = False

    def feed(self, event: Event) -> list[Part]:
        """Parts that an event completes; none after the end."""
        if self.ended:
            return []
        text, finish = "", self._finish(event.finish_reason)
        if event.token_id is not None:
            self.num_tokens += 1
            if event.token_id not in self._stop_ids:
                text = self._text.push(event.token_id)
        if finish is not None:
            text += self._text.finish()
        if self._text.stopped_by is not None:
            finish = Finish("stop", self._text.stopped_by)
        was_reasoning = self._speech.in_reasoning
        pieces = self._speech.feed(text) if text else []
        if event.token_id is not None and (was_reasoning or self._speech.in_reasoning):
            self.num_reasoning_tokens += 1
        if finish is not None:
            pieces += self._speech.finish()
        return self._parts(pieces, self._tokens(event), finish)

    def _finish(self, reason: FinishReason | None) -> Finish | None:
        return None if reason is None else Finish(reason.value)

    def _tokens(self, event: Event) -> tuple[TokenInfo, ...]:
        if not self._with_logprobs or event.token_id is None or event.logprobs is None:
            return ()
        return (TokenInfo(event.token_id, event.logprobs),)

    def _parts(
        self, pieces: Sequence[Piece], tokens: tuple[TokenInfo, ...], finish: Finish | None
    ) -> list[Part]:
        parts = []
        for piece in pieces:
            self._num_calls += piece.name is not None
            if self._num_calls > 1 and not self._parallel:
                finish = Finish("stop")
                break
            parts.append(self._part(piece))
        if finish is not None:
            self.ended = True
            if self._num_calls and finish.reason == "stop":
                finish = replace(finish, reason="tool_calls")
        if (tokens or finish) and not parts:
            parts.append(Part(self._index))
        if tokens:
            parts[0] = replace(parts[0], tokens=tokens)
        if finish:
            parts[-1] = replace(parts[-1], finish=finish)
        return parts

    def _part(self, piece: Piece) -> Part:
        if piece.call_id is None:
            return Part(self._index, content=piece.content, reasoning=piece.reasoning)
        tool = ToolPart(self._num_calls - 1, piece.call_id, piece.name, piece.arguments)
        return Part(self._index, tool=tool)


@dataclass(eq=False)
class _Open:
    """A choice that has no end yet, and its request."""

    choice: Choice
    ticket: Ticket


class Answers:
    """The choices of one HTTP request. Close it, whatever happens.

    Args:
        loop: what answers.
        path: of the request, for the log.
    """

    def __init__(self, loop: EngineLoop, path: str) -> None:
        self._loop, self._path, self._begun_at = loop, path, loop.clock()
        self._tickets: list[Ticket] = []
        self._closed = False
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._early: list[Event] = []
        self._open: dict[int, _Open] = {}
        self._choices: list[Choice] = []
        self._num_prompt_tokens = self._num_prefix_tokens = 0
        self._counted: set[int] = set()

    def add(self, request: Request, choice: Choice, *, counted: bool) -> None:
        """Submits the request of one more choice.

        Args:
            request: to be submitted.
            choice: takes its events.
            counted: whether its prompt counts for the usage: once for all choices to it.

        Raises:
            HotsetError: it is refused; those before it go on.
        """
        ticket = self._loop.submit(request, self._events)
        self._open[ticket.request_id] = _Open(choice, ticket)
        self._choices.append(choice)
        self._tickets.append(ticket)
        if counted:
            self._counted.add(ticket.request_id)
            self._num_prompt_tokens += ticket.num_prompt_tokens

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            self._num_prompt_tokens,
            sum(choice.num_tokens for choice in self._choices),
            num_prefix_tokens=self._num_prefix_tokens,
            num_reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
        )

    def close(self) -> None:
        """Cancels what has no end, and logs what there was: never a word of it. Safe to call
        twice."""
        if self._closed:
            return
        self._closed = True
        for entry in self._open.values():
            self._loop.cancel(entry.ticket)
        firsts = [ticket.first_at for ticket in self._tickets if ticket.first_at is not None]
        first = f"{min(firsts) - self._begun_at:.2f}" if firsts else "n/a"
        logger.info(
            "%s: %d prompt tokens, %d tokens in %.2f s (first after %s s), %s",
            self._path,
            self.usage.num_prompt_tokens,
            self.usage.num_tokens,
            self._loop.clock() - self._begun_at,
            first,
            "unfinished" if self._open else "finished",
        )
        self._open.clear()

    async def first(self, timeout: float) -> None:
        """Waits for the first event, so that a request which fails before it does so here.

        Raises:
            HotsetError: that failure.
        """
        try:
            event = await asyncio.wait_for(self._next(), timeout)
        except TimeoutError:
            return
        if event.error is not None:
            raise failed_in_a_step(event.error)
        self._early.append(event)

    async def parts(self) -> AsyncIterator[Part]:
        """Parts of all choices as they come, to the last one's end.

        Raises:
            HotsetError: a request failed; the others are cancelled by `close`.
        """
        while self._open:
            event = self._early.pop() if self._early else await self._next()
            for part in self._take(event):
                yield part

    async def _next(self) -> Event:
        event = await self._events.get()
        if event.request_id in self._counted:
            self._num_prefix_tokens += event.num_prefix_tokens
        return event

    def _take(self, event: Event) -> Iterator[Part]:
        entry = self._open.get(event.request_id)
        if entry is None:  # ended by a stop string; its last events are still on their way
            return
        if event.error is not None:
            raise failed_in_a_step(event.error)
        if event.finish_reason is FinishReason.CANCELLED:
            raise HttpError(Problem(503, "the request was cancelled", code="cancelled"))
        yield from entry.choice.feed(event)
        if entry.choice.ended:
            del self._open[event.request_id]
            self._loop.cancel(entry.ticket)

    async def whole(self) -> list[Whole]:
        """All choices, put together.

        Raises:
            HotsetError: a request failed.
        """
        choices = [Whole() for _ in self._choices]
        async for part in self.parts():
            choices[part.index].add(part)
        return choices
