"""The one thread that steps the engine, and the way of its events into asyncio.

HTTP runs in another thread and never waits for a step: it submits and cancels, and each request
has a queue that events arrive in. Knows nothing of text or of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hotset.core.errors import FatalError, HardwareError, HotsetError
from hotset.core.request import FinishReason
from hotset.runtime.requests import Event, Request, Scheduling

logger = logging.getLogger(__name__)

# How long an idle thread sleeps before it looks whether it should end; work wakes it at once.
_IDLE_SECONDS = 0.2


@dataclass(eq=False)
class Ticket:
    """One submitted request, on the side of asyncio.

    Attributes:
        request_id: the scheduler's number.
        num_prompt_tokens: of the request.
        submitted_at: by the loop's clock, seconds; `first_at` of the first token, `last_at` of the
            latest one, `None` before.
        events: what happened, in order; the last one has a finish reason.
        num_tokens: so far.
    """

    request_id: int
    num_prompt_tokens: int
    submitted_at: float
    events: asyncio.Queue[Event]
    first_at: float | None = None
    last_at: float | None = None
    num_tokens: int = 0


# Told of every event when it arrives: ticket as it was before, event, time.
Observer = Callable[[Ticket, Event, float], None]


class EngineLoop:
    """Steps a scheduler in a thread of its own.

    Methods are for the asyncio thread that called `start`, where they do not say otherwise.

    Args:
        scheduler: whose `step` no one else calls.
        observer: for metrics.
        clock: in seconds.

    Attributes:
        error: what ended the thread, if an error did.
        draining: no more requests are taken.
    """

    def __init__(
        self,
        scheduler: Scheduling,
        *,
        observer: Observer = lambda ticket, event, now: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler, self.clock = scheduler, clock
        self.error: HotsetError | None = None
        self.draining = False
        self._observer = observer
        self._open: dict[int, Ticket] = {}
        self._stopping = threading.Event()
        self._progress_at = clock()
        self._mean_seconds = 1.0
        self._num_layers = 0
        self._on_death: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="hotset-engine", daemon=True)
        self._aio: asyncio.AbstractEventLoop | None = None

    def start(self, *, on_death: Callable[[], None] = lambda: None) -> None:
        """Starts the thread.

        Args:
            on_death: called once, in the asyncio thread, when an error ends the engine and every
                open request has been told.
        """
        self._aio, self._on_death = asyncio.get_running_loop(), on_death
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Requests without an end."""
        return len(self._open)

    @property
    def seconds_without_progress(self) -> float:
        """Since a step ended, or an event or a layer of a prompt within one; 0 where nothing is to
        be done. Layers are looked at when this is asked."""
        layers = self.scheduler.counts().num_prompt_layers
        if layers != self._num_layers:
            self._num_layers, self._progress_at = layers, self.clock()
        return self.clock() - self._progress_at if self._open else 0.0

    @property
    def retry_after_seconds(self) -> int:
        """How long an answer takes, about: when to come again if the queue is full."""
        return max(1, min(60, round(self._mean_seconds)))

    def submit(self, request: Request, events: asyncio.Queue[Event]) -> Ticket:
        """Hands a request in.

        Args:
            request: whose `prompt_ids` are checked.
            events: where its events go; several requests may share one.

        Raises:
            QueueFullError: too many wait already.
            RequestError: it is wrong, or too long for the context.
            HotsetError: the engine has failed.
        """
        if self.error is not None:
            raise self.error
        if not self._open:
            self._progress_at = self.clock()
        number = self.scheduler.submit(request)
        ticket = Ticket(number, len(request.prompt_ids), self.clock(), events)
        self._open[number] = ticket
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request; does nothing where it has ended."""
        if ticket.request_id in self._open:
            self.scheduler.cancel(ticket.request_id)

    def drain(self) -> None:
        """Takes no more requests; those that are open go on."""
        self.draining = True
        self.scheduler.drain()

    def end_thread(self, timeout: float) -> bool:
        """Ends what is open, as failed, and then the thread. For any thread.

        Returns:
            Whether the thread ended in time; a step that hangs keeps it.
        """
        self._stopping.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def fail_open(self) -> None:
        """Tells every request that has no end that it will have none."""
        self._fail_all(HardwareError("the server is shutting down"))

    # The engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self.scheduler.wait(_IDLE_SECONDS):
                    self._post(self.scheduler.step(self._early))
                    self._progress_at = self.clock()
            self.scheduler.close()
            self._post(self.scheduler.step(self._early))
        except HotsetError as error:
            logger.critical("the engine has failed: %s", error.message)
            self._die(error)
        except Exception as error:  # a bug of ours: nobody above sees what this thread raises
            logger.critical("the engine has failed", exc_info=True)
            self._die(FatalError(f"the engine has failed: {type(error).__name__}: {error}"))

    def _early(self, event: Event) -> None:
        self._progress_at = self.clock()
        self._post([event])

    def _post(self, events: Sequence[Event]) -> None:
        if events:
            self._call(partial(self._hand_out, events, self.clock()))

    def _die(self, error: HotsetError) -> None:
        self._call(partial(self._bury, error))

    def _call(self, what: Callable[[], None]) -> None:
        assert self._aio is not None, "`start` was not called"
        try:
            self._aio.call_soon_threadsafe(what)
        except RuntimeError:  # the asyncio loop is closed: nobody is left to be told
            logger.debug("events after the end of the server")

    # The asyncio thread.

    def _hand_out(self, events: Sequence[Event], now: float) -> None:
        for event in events:
            ticket = self._open.get(event.request_id)
            if ticket is None:  # it was failed by `fail_open` while its step went on
                continue
            self._observer(ticket, event, now)
            if event.token_id is not None:
                ticket.num_tokens += 1
                ticket.first_at = now if ticket.first_at is None else ticket.first_at
                ticket.last_at = now
            ticket.events.put_nowait(event)
            if event.finish_reason is not None:
                del self._open[event.request_id]
                self._mean_seconds += 0.1 * (now - ticket.submitted_at - self._mean_seconds)

    def _bury(self, error: HotsetError) -> None:
        self.error = error
        self._fail_all(error)
        self._on_death()

    def _fail_all(self, error: HotsetError) -> None:
        now, failed = self.clock(), FinishReason.FAILED
        self._hand_out(
            [Event(request_id=i, finish_reason=failed, error=error) for i in self._open], now
        )
