"""Requests on their way in: checked, numbered, bounded while they wait, cancelled from any thread.

Knows which requests have no end yet and which of them nobody wants any more; nothing of how they
are answered. Every method may be called from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from hotset.core.errors import QueueFullError, RequestError
from hotset.core.request import FinishReason, check_length
from hotset.runtime.requests import Request, check_ids
from hotset.runtime.sequences import Sequence


@dataclass(eq=False)
class Answer:
    """A request that has not ended. Beyond the first two it belongs to the thread that steps.

    Attributes:
        number: what `submit` returned.
        request: as it was asked.
        ids: its prompt, and what was drawn so far.
        most: tokens that may be drawn.
        num_drawn: so far.
        num_prefix: tokens of the prompt that were reused.
        sequence: once it has been admitted.
        joined: it decodes.
    """

    number: int
    request: Request
    ids: list[int]
    most: int
    num_drawn: int = 0
    num_prefix: int = 0
    sequence: Sequence | None = None
    joined: bool = False


class Intake:
    """The requests of one scheduler that have no end.

    Args:
        vocab: ids are below it.
        context_tokens: longest prompt and answer together.
        max_waiting: more than these may not wait.
    """

    def __init__(self, *, vocab: int, context_tokens: int, max_waiting: int) -> None:
        self._vocab, self._context_tokens = vocab, context_tokens
        self._max_waiting = max_waiting
        self._changed = threading.Condition()  # guards all that follows
        self._open: dict[int, Answer] = {}
        self._waiting: deque[Answer] = deque()
        self._cancelled: set[int] = set()
        self._ended: Counter[FinishReason] = Counter()
        self._number = 0
        self._refusal = ""

    def submit(self, request: Request) -> int:
        """See `Scheduling.submit`."""
        ids = check_ids(request.prompt_ids, self._vocab)
        most = check_length(len(ids), request.max_tokens, self._context_tokens)
        request.sampling.check_vocab(self._vocab)
        with self._changed:
            if self._refusal:
                raise RequestError(self._refusal)
            if len(self._waiting) >= self._max_waiting:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait already, which is the most",
                    hint="try again later",
                )
            self._number += 1
            answer = Answer(self._number, request, ids, most)
            self._open[answer.number] = answer
            self._waiting.append(answer)
            self._changed.notify_all()
            return answer.number

    def cancel(self, number: int) -> None:
        """Nobody wants this request any more; nothing where it has ended."""
        with self._changed:
            if number in self._open:
                self._cancelled.add(number)
                self._changed.notify_all()

    def refuse(self, reason: str) -> None:
        """Takes no more requests, for the reason that was given first."""
        with self._changed:
            self._refusal = self._refusal or reason
            self._changed.notify_all()

    def wait(self, timeout: float | None, *, unless: Callable[[], bool]) -> bool:
        """Waits until a request is here or `unless` holds; whether one of them does."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._open) or unless(), timeout)

    def admit(self, open_sequence: Callable[[Answer], Sequence | None]) -> Answer | None:
        """The oldest request that waits, with its sequence; `None` while there is no room for it,
        or none waits."""
        with self._changed:
            if not self._waiting:
                return None
            answer = self._waiting[0]
            answer.sequence = open_sequence(answer)
            return None if answer.sequence is None else self._waiting.popleft()

    def end(self, answer: Answer, reason: FinishReason) -> None:
        """A request has its end."""
        with self._changed:
            if answer.sequence is None:
                self._waiting.remove(answer)
            del self._open[answer.number]
            self._cancelled.discard(answer.number)
            self._ended[reason] += 1

    def is_open(self, answer: Answer) -> bool:
        return answer.number in self._open

    def is_cancelled(self, answer: Answer) -> bool:
        return answer.number in self._cancelled

    def open_answers(self) -> list[Answer]:
        with self._changed:
            return list(self._open.values())

    def cancelled_answers(self) -> list[Answer]:
        with self._changed:
            return [self._open[number] for number in sorted(self._cancelled)]

    def counts(self) -> tuple[int, int, dict[FinishReason, int]]:
        """Requests without an end, those of them that wait, and ended ones by reason."""
        with self._changed:
            return len(self._open), len(self._waiting), dict(self._ended)
