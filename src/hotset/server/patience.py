"""Connections that let a request wait for the rest of it are closed. Knows bytes, no request.

Uvicorn closes connections that are idle behind an answer, and waits for ever within a request:
whoever sends a letter a minute on each of a thousand would leave no connection to anybody else.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.h11_impl import H11Protocol


def patient_protocol(seconds: float) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP, with an end to waiting.

    Args:
        seconds: that a request may take to arrive, head and body, from the connection or its first
            byte on. How long its answer takes is another matter.
    """

    class Patient(H11Protocol):
        _limit: TimerHandle | None = None

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            cycle = self.cycle
            if cycle is not None and not cycle.more_body and not cycle.response_complete:
                self._stop()  # the request is whole
            elif self._limit is None:
                self._limit = self.loop.call_later(seconds, self._late)

        def _late(self) -> None:
            self._limit = None
            self.transport.close()

        def _stop(self) -> None:
            if self._limit is not None:
                self._limit.cancel()
                self._limit = None

    return Patient
