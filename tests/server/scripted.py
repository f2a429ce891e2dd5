"""A scheduler that says what a test wants, and a server around it in a thread of this process.

The scheduler keeps the promises of `Scheduling`; there is no model behind it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hotset.core.errors import FatalError, HotsetError, QueueFullError, RequestError
from hotset.core.request import FinishReason, TokenLogprobs, check_length
from hotset.runtime.requests import Counts, Event, Request
from hotset.server.bind import bind
from hotset.server.config import ServerConfig
from hotset.server.run import Process
from hotset.server.served import Served


@dataclass
class Row:
    """One open request of a `ScriptedScheduler`."""

    request: Request
    tokens: list[int]
    limit: int
    num_done: int = 0
    cancelled: bool = False


@dataclass
class ScriptedScheduler:
    """Answers every request with the tokens of `script`, one a step.

    Attributes:
        script: request -> its tokens; the answer ends with them, as if a stop id had come.
        context_tokens, queue_size: limits.
        fail_at: an answer fails when it has so many tokens; `failure` is the error.
        fatal_at: the device fails then.
        gate: steps wait until it is set; `pause_seconds` is how long each takes.
        num_prefix_tokens: of each prompt, as if they had been reused.
        num_submitted, last: requests so far, and the latest of them.
        reasons_of: request -> how it ended.
    """

    script: Callable[[Request], Sequence[int]]
    context_tokens: int = 4096
    queue_size: int = 64
    fail_at: int | None = None
    failure: HotsetError = field(default_factory=lambda: RequestError("out of memory for a step"))
    fatal_at: int | None = None
    pause_seconds: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)
    num_prefix_tokens: int = 0
    num_submitted: int = 0

    def __post_init__(self) -> None:
        self.gate.set()
        self.rows: dict[int, Row] = {}
        self.reasons_of: dict[int, FinishReason] = {}
        self._lock = threading.Condition()
        self._draining = self._closed = False
        self._fatal: FatalError | None = None
        self._num_prompt = self._num_generated = self._num_steps = 0

    def submit(self, request: Request) -> int:
        limit = check_length(len(request.prompt_ids), request.max_tokens, self.context_tokens)
        with self._lock:
            if self._draining:
                raise RequestError("no more requests are taken")
            if len(self.rows) >= self.queue_size:
                raise QueueFullError(f"{len(self.rows)} requests wait already")
            self.num_submitted += 1
            self.last = request
            number = self.num_submitted
            self.rows[number] = Row(request, list(self.script(request)), limit)
            self._num_prompt += len(request.prompt_ids)
            self._lock.notify_all()
        return number

    def cancel(self, request_id: int) -> None:
        with self._lock:
            if request_id in self.rows:
                self.rows[request_id].cancelled = True
                self._lock.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: bool(self.rows or self._fatal), timeout)

    def step(self, early: Callable[[Event], None] | None = None) -> list[Event]:
        if self._fatal is not None:
            raise self._fatal
        self.gate.wait()
        time.sleep(self.pause_seconds)
        with self._lock:
            self._num_steps += 1
            made = [self._next(number, row) for number, row in list(self.rows.items())]
            if self._fatal is not None:
                made = [self._end(number, error=self._fatal) for number in list(self.rows)]
            return made

    def _next(self, number: int, row: Row) -> Event:
        if self._closed:
            return self._end(number, error=RequestError("this engine is closed"))
        if row.cancelled:
            return self._end(number, FinishReason.CANCELLED)
        if self.fail_at is not None and row.num_done == self.fail_at:
            return self._end(number, error=self.failure)
        if self.fatal_at is not None and row.num_done == self.fatal_at:
            self._fatal = FatalError("the device has fallen off the bus")
        if row.num_done == len(row.tokens):
            return self._end(number, FinishReason.STOP)
        token, row.num_done = row.tokens[row.num_done], row.num_done + 1
        self._num_generated += 1
        reason = FinishReason.LENGTH if row.num_done == row.limit else None
        wanted = row.request.sampling.logprobs
        logprobs = None
        if wanted is not None:
            logprobs = TokenLogprobs(-0.5, tuple((i, -1.0 - i) for i in range(wanted)))
        made = self._end(number, reason, token, logprobs)
        return replace(made, num_prefix_tokens=self.num_prefix_tokens * (row.num_done == 1))

    def _end(
        self,
        number: int,
        reason: FinishReason | None = FinishReason.FAILED,
        token: int | None = None,
        logprobs: TokenLogprobs | None = None,
        error: HotsetError | None = None,
    ) -> Event:
        if reason is not None:
            self.rows.pop(number, None)
            assert number not in self.reasons_of, "a request ended twice"
            self.reasons_of[number] = reason
        return Event(
            request_id=number,
            token_id=token,
            finish_reason=reason,
            error=error,
            logprobs=logprobs,
        )

    def drain(self) -> None:
        self._draining = True

    def close(self) -> None:
        with self._lock:
            self._closed = self._draining = True

    def counts(self) -> Counts:
        return Counts(
            num_running=len(self.rows),
            num_finished=dict(Counter(self.reasons_of.values())),
            num_prompt_tokens=self._num_prompt,
            num_generated_tokens=self._num_generated,
            num_steps=self._num_steps,
        )


@contextmanager
def running(
    served: Served, config: ServerConfig | None = None
) -> Iterator[tuple[str, Process, threading.Thread]]:
    """A server in a thread: its URL, itself, the thread."""
    config = config or ServerConfig(port=0)
    urls: list[str] = []
    started = threading.Event()

    def ready(url: str) -> None:
        urls.append(url)
        started.set()

    with bind(config) as bound:
        process = Process(served, config, ready=ready)
        thread = threading.Thread(target=lambda: asyncio.run(process.serve(sockets=[bound])))
        thread.start()
        try:
            assert started.wait(30), "the server did not start"
            yield urls[0], process, thread
        finally:
            process.should_exit = True
            thread.join(30)
            assert served.loop.end_thread(10)
