"""The scheduler: requests join and leave between steps, each ends exactly once, whatever fails.

First come, first served: the oldest request that waits is taken in as soon as a row is free and
the KV cache has room for the longest that it may become, so that nothing is evicted in the middle
of an answer. Knows requests and why they end; rows, prompts and books are handed to it, and text
is nobody's business here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from hotset.core.closing import Closing
from hotset.core.errors import FatalError, HotsetError, RequestError
from hotset.core.request import FinishReason
from hotset.runtime.degenerate import RepeatedToken
from hotset.runtime.faults import explain_failure, forget_frames
from hotset.runtime.intake import Answer, Intake
from hotset.runtime.pace import Pace
from hotset.runtime.parts import Parts
from hotset.runtime.prompt_share import PromptShare
from hotset.runtime.requests import Counts, Event, Request
from hotset.runtime.sampling import Draw

logger = logging.getLogger(__name__)


class _CancelledError(Exception):
    """The request whose prompt is being taken in is not wanted any more."""


class Scheduler(Closing):
    """See `Scheduling`, which this is.

    Args:
        parts: what it runs; nobody else may use rows and sampler meanwhile.
        max_waiting: requests beyond these are refused while they wait.
        clock: seconds; of the shares of prompts and answers.
    """

    def __init__(
        self, parts: Parts, *, max_waiting: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._parts: Parts | None = parts
        self._clock = clock
        self._intake = Intake(
            vocab=parts.vocab, context_tokens=parts.context_tokens, max_waiting=max_waiting
        )
        self._closing = False
        # What follows is touched within `_stepping` only.
        self._stepping = threading.Lock()
        self._share = PromptShare(parts.prefill_share)
        self._since = 0.0  # until then the share knows of the time
        self._decoded_at: float | None = None  # when the step before ended, with nothing since
        self._running: dict[int, Answer] = {}  # by row
        self._events: list[Event] = []
        self._tell: Callable[[Event], None] = self._events.append
        self._early: Callable[[Event], None] | None = None
        self._fatal: FatalError | None = None
        self._repeated = RepeatedToken()
        self._counts = Counts()

    def submit(self, request: Request) -> int:
        return self._intake.submit(request)

    def cancel(self, request_id: int) -> None:
        self._intake.cancel(request_id)

    def wait(self, timeout: float | None = None) -> bool:
        return self._intake.wait(timeout, unless=self._is_left)

    def _is_left(self) -> bool:
        """Whether there is something to do or to tell without any request."""
        parts = self._parts
        is_queued = parts is not None and self._fatal is None and parts.rows.num_in_flight > 0
        return is_queued or bool(self._events or self._fatal)

    def drain(self) -> None:
        self._intake.refuse("no more requests are taken")

    def close(self) -> None:
        self._closing = True
        self._intake.refuse("this engine is closed")
        with self._stepping:
            parts, self._parts = self._parts, None
            if parts is not None:
                with parts.steps.exclusive():
                    self._end_all(parts)

    def counts(self) -> Counts:
        num_open, num_waiting, ended = self._intake.counts()
        parts = self._parts
        num_blocks, num_used = (0, 0) if parts is None else parts.rows.num_blocks
        return replace(
            self._counts,
            num_running=num_open - num_waiting,
            num_waiting=num_waiting,
            num_finished=ended,
            num_blocks=num_blocks,
            num_blocks_used=num_used,
        )

    def step(self, early: Callable[[Event], None] | None = None) -> list[Event]:
        with self._stepping:
            self._early = early
            if self._parts is not None:
                self._check_device()
                with self._parts.steps.exclusive():
                    self._serve(self._parts)
            events = list(self._events)
            self._events.clear()
            return events

    def _serve(self, parts: Parts) -> None:
        """One step: what is not wanted any more ends, then a prompt, or a token for each row."""
        self._end_cancelled(parts)
        answer, is_due = None, self._share.step_is_due()
        if not is_due:
            answer = self._intake.admit(
                lambda oldest: parts.rows.open(len(oldest.ids) + oldest.most, oldest.ids)
            )
        if answer is not None:
            self._begin(parts, answer)
        elif self._running:
            # One that is due is followed by a prompt, and not by what was queued behind it.
            self._decode(parts, ahead=not is_due)
        else:  # what was queued when the last answer ended has books to be kept
            self._drain(parts)
        if not self._running:
            self._share.forgive()
            self._decoded_at = None

    def _begin(self, parts: Parts, answer: Answer) -> None:
        """Takes a prompt in and draws the first token; the answer then decodes."""
        sequence, request = answer.sequence, answer.request
        assert sequence is not None
        try:
            # The rows change behind the prompt anyway, and a short one may fill slots itself.
            self._drain(parts)
            self._check_device()
            num_shared, self._since = sequence.length, self._clock()
            self._decoded_at = None
            self._share.prompt_begins()
            new_ids = answer.ids[num_shared:]
            with parts.room(len(new_ids)):
                logits_V = parts.take_in(sequence, new_ids, self._between_layers(parts, answer))
                sequence.keep(answer.ids)
                parts.sampler.start(
                    sequence.row,
                    request.sampling,
                    prompt_ids=answer.ids,
                    matcher=request.matcher,
                )
                draw = parts.sampler.draw(sequence.row, logits_V)
        except _CancelledError:
            self._end(parts, answer, FinishReason.CANCELLED)
            return
        except BaseException as error:  # noqa: BLE001 - whatever it is, a request ends by it
            self._fail(parts, [answer], error)
            return
        finally:
            self._count_prompt_time()  # a short prompt's, and what is behind a long one's pieces
        answer.num_prefix = num_shared
        self._count(num_prompt_tokens=len(answer.ids), num_prefix_tokens=num_shared)
        try:
            self._put(parts, answer, draw)
            if self._intake.is_open(answer):
                parts.rows.join(sequence, draw.token, answer.most - 1)
                answer.joined, self._running[sequence.row] = True, answer
        except BaseException as error:  # noqa: BLE001 - whatever it is, a request ends by it
            self._fail(parts, [answer], error)

    def _between_layers(self, parts: Parts, answer: Answer) -> Callable[[], None]:
        """Serves the running answers while a prompt runs, by its share; ends the prompt with an
        exception when it is not wanted any more."""
        pace = Pace(parts.device)

        def between() -> None:
            self._count(num_prompt_layers=1)
            if self._closing:
                raise RequestError("this engine is closed", hint="load the model again")
            if self._intake.is_cancelled(answer):
                raise _CancelledError
            if not self._running:
                return
            pace.wait()
            self._count_prompt_time()
            self._share.piece_ended()
            is_due = partial(self._share.step_is_due, num_pieces=1 + pace.num_queued)
            # What is still queued of the prompt is its time, and not the steps'.
            if is_due() and pace.catch_up():
                self._count_prompt_time()
            with self._telling_early():
                self._end_cancelled(parts)
                while self._running and is_due():
                    self._decode(parts, ahead=False, beside=True)
            self._check_device()
            self._decoded_at = None

        return between

    def _count_prompt_time(self) -> None:
        """A prompt has had the time until now; those who waited for it are owed."""
        seconds = self._lap(self._clock())
        if self._running:
            self._share.prompt_ran(seconds)

    def _lap(self, now: float) -> float:
        """Seconds that the share does not know of, with what the host did behind steps."""
        self._since, since = now, self._since
        return now - since

    @contextmanager
    def _telling_early(self) -> Iterator[None]:
        """Within the block events go to `early`, behind those that have not been told yet."""
        if self._early is not None:
            for event in self._events:
                self._early(event)
            self._events.clear()
            self._tell = self._early
        try:
            yield
        finally:
            self._tell = self._events.append

    def _decode(self, parts: Parts, *, ahead: bool, beside: bool = False) -> None:
        """A token for each row."""
        began, num_rows = self._clock(), len(self._running)
        drawn = self._drawn(parts, lambda: parts.rows.step(ahead=ahead))
        now = self._clock()
        # What the host does between two steps delays the next one, unless that is queued.
        since = began if self._decoded_at is None else self._decoded_at
        self._share.step_ran(self._lap(now), num_rows=num_rows, beside=beside)
        self._count(num_steps=1, decode_seconds=now - since)
        self._decoded_at = now
        self._put_all(parts, drawn)

    def _drain(self, parts: Parts) -> None:
        """Takes in what is in flight."""
        if not parts.rows.num_in_flight:
            return
        began = self._clock()
        drawn = self._drawn(parts, parts.rows.drain)
        self._count(decode_seconds=self._clock() - began)
        self._put_all(parts, drawn)

    def _drawn(
        self, parts: Parts, run: Callable[[], list[tuple[int, Draw]]]
    ) -> list[tuple[int, Draw]]:
        """What a step drew; nothing if it failed, and then all that it served have."""
        try:
            with parts.room(len(self._running)):
                return run()
        except BaseException as error:  # noqa: BLE001 - whatever it is, requests end by it
            parts.rows.forget()
            self._fail(parts, list(self._running.values()), error, mend=True)
            return []

    def _put_all(self, parts: Parts, drawn: list[tuple[int, Draw]]) -> None:
        left = deque(drawn)
        try:
            while left:
                row, draw = left[0]
                # A row may have ended by the draw before, with this one queued behind it.
                if row in self._running:
                    self._put(parts, self._running[row], draw)
                left.popleft()
        except BaseException as error:  # noqa: BLE001 - whatever it is, requests end by it
            # The model has taken these tokens in, and nobody was told.
            lost = [self._running[row] for row, _ in left if row in self._running]
            self._fail(parts, lost, error)

    def _put(self, parts: Parts, answer: Answer, draw: Draw) -> None:
        """One more token of an answer, which may be its last."""
        assert answer.sequence is not None
        row, sampler = answer.sequence.row, parts.sampler
        try:
            token = draw.require_finite()
            sampler.accept(row, token)
        except Exception as error:  # noqa: BLE001 - a matcher is somebody else's code
            self._fail(parts, [answer], error)
            return
        answer.ids.append(token)
        answer.num_drawn += 1
        self._repeated.look(answer.ids, answer.num_drawn)
        self._count(num_generated_tokens=1)
        event = Event(
            request_id=answer.number,
            token_id=token,
            logprobs=sampler.logprobs(row, draw),
            num_prefix_tokens=answer.num_prefix if answer.num_drawn == 1 else 0,
        )
        if token in answer.request.stop_ids or sampler.is_complete(row):
            self._end(parts, answer, FinishReason.STOP, event)
        elif answer.num_drawn == answer.most:
            self._end(parts, answer, FinishReason.LENGTH, event)
        else:
            self._tell(event)

    def _end_cancelled(self, parts: Parts) -> None:
        for answer in self._intake.cancelled_answers():
            # A prompt that is being taken in ends by itself.
            if answer.joined or answer.sequence is None:
                self._end(parts, answer, FinishReason.CANCELLED)

    def _end(
        self, parts: Parts, answer: Answer, reason: FinishReason, last: Event | None = None
    ) -> None:
        """The one end of a request: first its memory is free, then whoever asked is told.

        Args:
            last: what it is told besides.
        """
        sequence = answer.sequence
        if answer.joined and sequence is not None:
            del self._running[sequence.row]
            parts.rows.leave(sequence.row)
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                # The newest token was drawn, and never taken in.
                sequence.keep(answer.ids[:-1], decoded=True)
        if sequence is not None:
            sequence.close()
        self._intake.end(answer, reason)
        event = last or Event(request_id=answer.number)
        self._tell(replace(event, request_id=answer.number, finish_reason=reason))

    def _fail(
        self,
        parts: Parts,
        answers: Iterable[Answer],
        error: BaseException,
        *,
        mend: bool = False,
    ) -> None:
        """Ends answers by an error; all that are left if nothing runs on the device any more.

        Raises:
            BaseException: the error, where it is no failure but an interruption.
        """
        told = explain_failure(error, parts.device)
        if not isinstance(error, HotsetError | KeyboardInterrupt):
            logger.error("a step failed", exc_info=error)
        if isinstance(error, Exception):
            forget_frames(error)
        if isinstance(told, FatalError):
            self._fatal = told
            self._intake.refuse(told.message)
            answers = self._intake.open_answers()
        elif mend:
            parts.steps.mend()
        for answer in filter(self._intake.is_open, list(answers)):
            self._end(parts, answer, FinishReason.FAILED, Event(request_id=0, error=told))
        if not isinstance(error, Exception):
            raise error

    def _check_device(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    def _end_all(self, parts: Parts) -> None:
        error = RequestError("this engine is closed", hint="load the model again")
        for answer in self._intake.open_answers():
            self._end(parts, answer, FinishReason.FAILED, Event(request_id=0, error=error))
        if self._fatal is None:
            self._drain(parts)

    def _count(self, **more: float) -> None:
        old = self._counts
        self._counts = replace(
            old, **{name: getattr(old, name) + number for name, number in more.items()}
        )
