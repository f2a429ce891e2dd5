"""The life of a server process: serve, drain, exit. Knows signals and exit codes, no requests.

One process, no children: whoever kills it, with whatever signal, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from hotset.server.app import create_app
from hotset.server.config import ServerConfig
from hotset.server.patience import patient_protocol
from hotset.server.served import Served

logger = logging.getLogger(__name__)

# While draining, an engine that makes no progress for so long is given up; the sum of these two is
# what a hung step can delay an exit by.
_GIVE_UP_SECONDS = 5.0
_LAST_STEP_SECONDS = 2.0
# For answers that are told of the end to reach their clients.
_FLUSH_SECONDS = 2
_TICK_SECONDS = 0.05


class Process(uvicorn.Server):
    """Uvicorn, with our way of ending.

    The first SIGTERM or SIGINT drains: no new requests, running ones go on for `drain_seconds`.
    The second exits. An engine that fails exits at once, when open requests have been told.

    Args:
        served: the model.
        config: the server's.
        ready: called with the URL when requests can come.
    """

    def __init__(
        self,
        served: Served,
        config: ServerConfig,
        *,
        ready: Callable[[str], None],
    ) -> None:
        self._served, self._settings, self._ready = served, config, ready
        self._draining: asyncio.Task[None] | None = None
        self._aio: asyncio.AbstractEventLoop | None = None
        self.exit_code = 0
        self.hangs = False  # the thread was waited for, and goes on
        app = create_app(served, config, on_death=self._died)
        super().__init__(
            uvicorn.Config(
                app,
                http=patient_protocol(config.request_seconds),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
                h11_max_incomplete_event_size=config.max_header_bytes,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's, and then the word that it is ready."""
        self._aio = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by a signal, between any two instructions of the main thread."""
        if self._aio is not None:
            self._aio.call_soon_threadsafe(self._signalled, sig)
        else:
            self.should_exit = True

    def _signalled(self, sig: int) -> None:
        if self._draining is not None or self.should_exit:
            logger.warning("second signal: exiting without the open requests")
            # Requests that are cut off now would each be logged with a traceback.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self.exit_code = 128 + sig
            self.force_exit = self.should_exit = True
            return
        waiting = self._served.loop.num_open
        logger.warning("%s: draining %d open requests", signal.Signals(sig).name, waiting)
        self._served.loop.drain()
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        loop, deadline = self._served.loop, self._settings.drain_seconds
        start = loop.clock()
        while loop.num_open:
            stuck = loop.seconds_without_progress > _GIVE_UP_SECONDS
            if stuck or loop.clock() - start > deadline:
                logger.error("%d requests are left unfinished", loop.num_open)
                self.exit_code = 1
                break
            await asyncio.sleep(_TICK_SECONDS)
        # Those that are left are told; then their connections can close.
        self.hangs = not await asyncio.to_thread(loop.end_thread, _LAST_STEP_SECONDS)
        loop.fail_open()
        self.should_exit = True

    def _died(self) -> None:
        self.exit_code = 1
        self.should_exit = True


def serve(
    served: Served,
    config: ServerConfig,
    bound: socket.socket,
    *,
    ready: Callable[[str], None],
) -> None:
    """Serves until a signal or the end of the engine.

    Args:
        served: the model; its loop is not started yet.
        config: the server's.
        bound: from `bind.bind`.
        ready: called with the URL when requests can come.

    Raises:
        HotsetError: what the engine failed of.
        SystemExit: not every request was answered to its end.
    """

    async def run() -> Process:
        process = Process(served, config, ready=ready)
        await process.serve(sockets=[bound])
        return process

    process = asyncio.run(run())
    exit_code = process.exit_code
    if not served.loop.end_thread(0.0 if process.hangs else _LAST_STEP_SECONDS):
        # Memory is the step's that hangs: nothing can be given back before the process ends.
        logger.critical("the engine hangs in a step; exiting without it")
        logging.shutdown()
        sys.stdout.flush()
        os._exit(exit_code or 1)
    if served.loop.error is not None:
        raise served.loop.error
    if exit_code:
        sys.exit(exit_code)
