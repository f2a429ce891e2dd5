"""The life of a server process: signals, exits, what is left behind. Each server is a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import httpx2
import psutil
import pytest
from clients import NAME, TEMPLATE, WAIT_SECONDS, wait_until

from vocabulary import byte_tokenizer

TESTS = Path(__file__).resolve().parents[1]
# Less than draining may take (and than the answer, unless it is hurried). An idle machine needs
# 2 s to take the process apart, torch and all; a busy one has needed more than 20.
EXIT_SECONDS = 90.0
BODY = {"model": NAME, "prompt": "hi", "max_tokens": 500, "stream": True}


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str = ""

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:")

    def stream(self) -> Iterator[str]:
        """Lines of a long answer."""
        url = f"{self.url}/v1/completions"
        with httpx2.stream("POST", url, json=BODY, timeout=WAIT_SECONDS) as answer:
            yield from (line for line in answer.iter_lines() if line)

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=WAIT_SECONDS)

    def drain(self) -> None:
        """The first signal, until the server has taken it: two that wait would be one."""
        self.process.send_signal(signal.SIGTERM)
        wait_until(lambda: self.get("/health").json()["status"] == "draining")

    def exit(self, timeout: float = EXIT_SECONDS) -> int:
        return self.process.wait(timeout)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers; most of a start is imports, so tests start theirs together."""
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer(template=TEMPLATE).save_pretrained(folder)
    paths = os.pathsep.join([str(TESTS), str(TESTS / "server")])
    started: list[subprocess.Popen[str]] = []

    def start(*args: str) -> Server:
        process = subprocess.Popen(
            [sys.executable, str(TESTS / "server" / "serve_scripted.py"), str(folder), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return Server(process)

    yield start
    for process in started:
        # A forked server that a failed test left would hold the pipes for ever.
        for one in [*children_of(process), process]:
            one.kill()
        process.communicate()


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Its processes, if it still runs."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def files_of(process: psutil.Process) -> list[str]:
    """What a process has in its memory, as far as one may look."""
    try:
        return [part.path for part in process.memory_maps()]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


@pytest.fixture(scope="module")
def servers(start: Callable[..., Server]) -> dict[str, Server]:
    """One server for each test, started together."""
    made = {name: start() for name in ("drains", "twice")}
    made["hangs"] = start("hang")
    for server in made.values():
        server.wait_ready()
    return made


def test_the_first_signal_drains(servers: dict[str, Server]) -> None:
    """What runs comes to its end, what is new is refused, and then the exit code is 0."""
    server = servers["drains"]
    lines = server.stream()
    next(lines)
    # FT-02: nobody who could outlive it, whatever kills it.
    assert psutil.Process(server.process.pid).children(recursive=True) == []
    server.drain()
    refused = httpx2.post(f"{server.url}/v1/completions", json=BODY, timeout=WAIT_SECONDS)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    health = server.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "draining"
    server.process.send_signal(signal.SIGUSR1)
    assert list(lines)[-1] == "data: [DONE]"
    assert server.exit() == 0


def test_the_second_signal_exits(servers: dict[str, Server]) -> None:
    server = servers["twice"]
    lines = server.stream()
    next(lines)
    server.drain()
    server.process.send_signal(signal.SIGTERM)
    assert server.exit() == 128 + signal.SIGTERM
    assert server.process.stderr is not None
    assert "Traceback" not in server.process.stderr.read()


def test_a_step_that_hangs_cannot_hold_the_process(servers: dict[str, Server]) -> None:
    """FT-03: and its client is told."""
    server = servers["hangs"]
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.extend(server.stream()))
    reader.start()
    wait_until(lambda: len(got) >= 3)  # the step behind the third token does not end
    server.process.send_signal(signal.SIGTERM)
    assert server.exit(10) == 1
    reader.join(30)
    assert "the server is shutting down" in got[-1]


def test_killed_and_started_again_five_times(start: Callable[..., Server]) -> None:
    """FT-02: in the middle of an answer, on the same port; nothing of the one before is in the way.
    Each server is a process forked from one that has imported everything, which takes the time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    forks = start(f"port={port}", "forks")
    assert forks.process.stdin is not None
    shared_before = set(Path("/dev/shm").glob("*"))
    for number in range(6):
        forks.process.stdin.write("next\n")
        forks.process.stdin.flush()
        forks.wait_ready()
        assert forks.url.endswith(f":{port}")
        (served,) = psutil.Process(forks.process.pid).children(recursive=True)
        lines = forks.stream()
        assert "data: " in next(lines), number
        health = forks.get("/health").json()
        assert (health["status"], health["requests"]) == ("ok", 1), "its own request alone"
        if number < 5:
            served.kill()
            with pytest.raises(httpx2.HTTPError):
                list(lines)
        else:
            served.send_signal(signal.SIGUSR1)
            assert list(lines)[-1] == "data: [DONE]"
    served.kill()
    served.wait()
    # What another program has open is that program's; what a killed server left nobody has open.
    new = {str(file) for file in set(Path("/dev/shm").glob("*")) - shared_before}
    left = new - set(chain.from_iterable(map(files_of, psutil.process_iter())))
    assert not [file for file in left if Path(file).exists()], "no shared memory is left"


def test_a_port_that_is_taken_is_refused_at_once() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "hotset.cli.entry",
            "serve",
            "no/such",
            "--port",
            str(port),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert f"cannot listen on `127.0.0.1` port {port}: Address already in use" in done.stderr
