"""A server process with a scripted scheduler: `python serve_scripted.py FOLDER [option]...`.

Prints its URL. The tokenizer is that of the folder; a prompt is answered by 200 tokens, which
come slowly until SIGUSR1, and with `hang` the step after the third token never ends. `port=N` sets
the port. With `forks` each line on stdin starts a server in a process of its own, once the one
before has gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from clients import served_by
from scripted import ScriptedScheduler

from hotset.runtime.requests import Event
from hotset.runtime.text import Text
from hotset.server.bind import bind
from hotset.server.config import ServerConfig
from hotset.server.run import serve
from tiny import tiny_config

# Longer than a test waits for an exit: one that comes in time is not draining's.
DRAIN_SECONDS = 120.0


class Slow(ScriptedScheduler):
    """A token takes half a second, so that an answer takes longer than any test, until `hurry`;
    and perhaps one takes for ever."""

    hangs = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hurry = threading.Event()

    def step(self, early: object = None) -> list[Event]:
        self.hurry.wait(0.5)
        if self.hangs and any(row.num_done == 3 for row in self.rows.values()):
            threading.Event().wait()
        return super().step()


def main(folder: str, options: list[str]) -> None:
    ports = [int(option.removeprefix("port=")) for option in options if option.startswith("port=")]
    config = ServerConfig(port=ports[0] if ports else 0, drain_seconds=DRAIN_SECONDS)
    if "forks" not in options:
        answer(folder, config, hangs="hang" in options)
        return
    for _ in sys.stdin:
        if (child := os.fork()) == 0:
            answer(folder, config, hangs=False)
            os._exit(0)
        os.waitpid(child, 0)


def answer(folder: str, config: ServerConfig, *, hangs: bool) -> None:
    text = Text(Path(folder), tiny_config("qwen3_moe"))
    scheduler = Slow(lambda request: [70] * 200)
    scheduler.hangs = hangs
    signal.signal(signal.SIGUSR1, lambda *_: scheduler.hurry.set())
    with bind(config) as bound:
        serve(served_by(scheduler, text), config, bound, ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
