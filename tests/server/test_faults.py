"""What goes wrong in a running server: clients leave, queues fill, steps and devices fail."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from clients import NAME, Scripted, serving, wait_until

from hotset.core.errors import HardwareError
from hotset.core.request import FinishReason
from hotset.runtime.text import Text
from hotset.server.config import ServerConfig

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
URL = "/v1/chat/completions"
BODY = json.dumps(CHAT).encode()
HEAD = (
    f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n"
).encode()


@pytest.fixture
def fresh(byte_text: Text) -> Iterator[Scripted]:
    """A server of its own, with room for two requests."""
    with serving(byte_text, ServerConfig(port=0, stall_seconds=0.2), queue_size=2) as server:
        yield server


def connected(server: Scripted) -> socket.socket:
    """A new connection to the server, for what no client would send."""
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30)


def ends(server: Scripted) -> list[FinishReason]:
    """How every request so far has ended."""
    server.ended()
    return [server.scheduler.reasons_of[n + 1] for n in range(server.scheduler.num_submitted)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed_within_a_step(fresh: Scripted, stream: bool) -> None:
    """SV-05."""
    fresh.say("x" * 3000)
    fresh.scheduler.pause_seconds = 0.01
    body = {**CHAT, "stream": stream}
    if stream:
        with httpx2.stream("POST", fresh.url + URL, json=body, timeout=20) as answer:
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(6)]
    else:
        with connected(fresh) as connection:
            connection.sendall(HEAD + BODY)
            # A client's timeout might be over before a busy server has begun.
            wait_until(lambda: fresh.scheduler.num_submitted > 0)
    start = time.monotonic()
    assert ends(fresh) == [FinishReason.CANCELLED]
    assert time.monotonic() - start < 10, "the whole answer would take 30"


def test_a_full_queue_says_when_to_come_again(fresh: Scripted) -> None:
    fresh.scheduler.gate.clear()
    fresh.say("x" * 10)
    with httpx2.Client(timeout=20) as client:
        body = {**CHAT, "n": 3}
        answer = client.post(fresh.url + URL, json=body)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
    fresh.scheduler.gate.set()
    assert ends(fresh) == [FinishReason.CANCELLED] * 2, "the choices that had room were let go"
    with pytest.raises(openai.RateLimitError):
        fresh.scheduler.queue_size = 0
        fresh.openai().chat.completions.create(**CHAT)
    with pytest.raises(anthropic.RateLimitError):
        fresh.anthropic().messages.create(**CHAT, max_tokens=1)


def test_a_failure_before_the_first_token_has_a_status(fresh: Scripted) -> None:
    """SV-12; MB-07."""
    fresh.scheduler.fail_at = 0
    for stream in (False, True):
        answer = httpx2.post(fresh.url + URL, json={**CHAT, "stream": stream}, timeout=20)
        assert answer.status_code == 503
        assert "out of memory for a step" in answer.json()["error"]["message"]
    fresh.scheduler.fail_at = None
    assert httpx2.post(fresh.url + URL, json=CHAT, timeout=20).status_code == 200


def test_a_failure_in_a_stream_is_its_last_event(fresh: Scripted) -> None:
    """SV-12."""
    fresh.scheduler.fail_at = 2
    answer = httpx2.post(fresh.url + URL, json={**CHAT, "stream": True}, timeout=20)
    *events, last = [line for line in answer.text.splitlines() if line]
    assert answer.status_code == 200 and len(events) == 3
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    with pytest.raises(openai.APIError, match="out of memory"):
        list(fresh.openai().chat.completions.create(**CHAT, stream=True))
    with (
        pytest.raises(anthropic.APIStatusError, match="out of memory"),
        fresh.anthropic().messages.stream(**CHAT, max_tokens=9) as stream,
    ):
        stream.until_done()
    with pytest.raises(openai.APIError, match="out of memory"):
        list(fresh.openai().responses.create(model=NAME, input="hi", stream=True))


def test_one_failed_choice_ends_the_others(fresh: Scripted) -> None:
    answers = iter([3, 1000])
    fresh.scheduler.script = lambda request: [70] * next(answers)
    fresh.scheduler.failure = HardwareError("one row only")
    fresh.scheduler.fail_at = 5
    with pytest.raises(openai.InternalServerError, match="one row only"):
        fresh.openai().chat.completions.create(**CHAT, n=2)
    assert ends(fresh) == [FinishReason.STOP, FinishReason.FAILED]


def test_a_device_that_fails_for_good(byte_text: Text) -> None:
    """FT-01: open requests are told, and the process is to end with another code than 0."""
    with serving(byte_text) as server:
        server.scheduler.fatal_at = 3
        answer = httpx2.post(server.url + URL, json={**CHAT, "stream": True}, timeout=20)
        assert "fallen off the bus" in answer.text.splitlines()[-2]
        server.thread.join(10)
        assert not server.thread.is_alive()
        assert server.process.exit_code == 1
        assert server.served.loop.error is not None


def test_health_follows_the_steps(fresh: Scripted) -> None:
    """FT-07: a step that hangs, and one that goes on."""
    client = httpx2.Client(base_url=fresh.url, timeout=20)
    assert client.get("/health").json()["status"] == "ok"
    fresh.scheduler.gate.clear()
    with pytest.raises(httpx2.ReadTimeout):
        client.post(URL, json=CHAT, timeout=0.1)
    deadline = time.monotonic() + 10
    while (answer := client.get("/health")).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert answer.status_code == 503 and answer.json()["status"] == "stalled"
    fresh.scheduler.gate.set()
    fresh.ended()
    assert client.get("/health").json() == {
        "status": "ok",
        "requests": 0,
        "seconds_without_progress": 0.0,
    }


def test_a_request_that_never_arrives_holds_no_connection(byte_text: Text) -> None:
    """Nothing, half a head, half a body, and a second request; an answer may take longer."""
    config = ServerConfig(port=0, request_seconds=2)
    with serving(byte_text, config, pause_seconds=0.6) as server, ExitStack() as opened:
        all_sent = (b"", HEAD[:30], HEAD + BODY[:-5], HEAD + BODY + HEAD[:30])
        connections = [opened.enter_context(connected(server)) for _ in all_sent]
        for connection, sent in zip(connections, all_sent, strict=True):
            connection.sendall(sent)
        for connection, sent in zip(connections, all_sent, strict=True):
            received = b"".join(iter(partial(connection.recv, 65536), b""))
            assert (b'"Hello"' in received) == (BODY in sent)
        assert ends(server) == [FinishReason.STOP], "the last one, whose answer took five pauses"


def test_many_requests_on_old_and_new_connections(server: Scripted) -> None:
    """FT-10."""
    with httpx2.Client(timeout=20) as client:
        kept = [client.post(server.url + URL, json=CHAT).status_code for _ in range(15)]
    fresh = [httpx2.post(server.url + URL, json=CHAT, timeout=20).status_code for _ in range(15)]
    assert kept + fresh == [200] * 30
