"""Server-sent events: how a stream of JSON objects goes over HTTP; nothing of what is in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from hotset.server.wire import dump

# Proxies close connections that say nothing for a minute.
KEEP_ALIVE_SECONDS = 15.0
COMMENT = ": still working\n\n"
"""What every client skips; some of them wait no longer for it."""

DONE = "data: [DONE]\n\n"


def event(data: object, *, name: str | None = None) -> str:
    """One event; line ends within the JSON are escaped by JSON itself."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {dump(data).decode()}\n\n"


class EventStream(StreamingResponse):
    """A response that streams events; when the client goes away its source is closed at once.

    Args:
        source: the events.
        on_end: called when the response is over, even if nothing of it was ever sent.
        keep_alive: what is sent where no event comes for a while.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncIterator[str],
        *,
        on_end: Callable[[], None],
        keep_alive: str = COMMENT,
    ) -> None:
        # Nginx would collect events before it passes them on.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_kept_alive(source, keep_alive), headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _kept_alive(source: AsyncIterator[str], keep_alive: str) -> AsyncIterator[str]:
    """The same events, and others where none comes for a while."""
    async with aclosing(source) as events:  # type: ignore[type-var]
        next_event: asyncio.Task[Any] | None = None
        try:
            while True:
                next_event = next_event or asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait({next_event}, timeout=KEEP_ALIVE_SECONDS)
                if not done:
                    yield keep_alive
                    continue
                try:
                    text = next_event.result()
                except StopAsyncIteration:
                    return
                finally:
                    next_event = None
                yield text
        finally:
            if next_event is not None:
                next_event.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration):
                    await next_event
