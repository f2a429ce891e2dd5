"""A server of vLLM's as a process: started, waited for, ended with all that it has started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

START_SECONDS = 300


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def listening(
    command: Sequence[str], *, port: int, log: Path, environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The address of the server that a command starts, once it answers and says that hotset runs.

    Args:
        port: that the command names.
        log: where it writes.
        environ: beside this process's own.
    """
    variables = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"} | dict(environ or {})
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=variables
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process, log)
        yield url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-5000:]
        try:
            if httpx2.get(f"{url}/health").status_code == 200:
                break
        except httpx2.TransportError:
            time.sleep(1)
    else:
        raise AssertionError(f"no answer in {START_SECONDS} s: {log.read_text()[-5000:]}")
    assert "experts of" in log.read_text(), "hotset has the experts, and says so"
