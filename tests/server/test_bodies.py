"""Large bodies are read beside the event loop, small ones on it; a client sees no difference."""

from __future__ import annotations

import threading
from typing import Any

import httpx2
import pytest
from clients import NAME, Scripted

from hotset.server import wire
from hotset.server.bodies import LARGE_BODY_BYTES

PATHS = {
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/messages": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1},
    "/v1/completions": {"max_tokens": 1},
    "/tokenize": {},
}


def body_of(path: str, text: str) -> dict[str, Any]:
    """A request of about this many letters, most of them of no consequence."""
    names = {"/v1/completions": "prompt", "/v1/responses": "input", "/tokenize": "prompt"}
    asked: Any = "hi" if path in names else [{"role": "user", "content": "hi"}]
    padding = {"metadata": {"user_id": text}} if path == "/v1/messages" else {"user": text}
    if path == "/tokenize":
        asked, padding = f"hi{text}", {}
    return {"model": NAME, names.get(path, "messages"): asked, **padding, **PATHS[path]}


def post(server: Scripted, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    answer = httpx2.post(f"{server.url}{path}", json=body, timeout=30)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("path", PATHS)
def test_the_loop_reads_small_bodies_only(
    server: Scripted, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []
    check = wire._check_shape

    def recorded(value: object) -> None:
        readers.append(threading.current_thread().name)
        check(value)

    monkeypatch.setattr(wire, "_check_shape", recorded)
    loop_thread = server.thread.name
    assert post(server, path, body_of(path, "x"))[0] == 200
    assert readers == [loop_thread]
    readers.clear()
    status, answer = post(server, path, body_of(path, "x" * LARGE_BODY_BYTES))
    assert status == 200, answer
    assert readers and all(name.startswith("bodies") for name in readers), "and on no other"


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/tokenize"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "hot"},
        {"surprise": 1},
        {"model": ""},
        {"max_tokens": [], "max_output_tokens": []},
    ],
)
def test_both_are_refused_in_the_same_words(
    server: Scripted, path: str, wrong: dict[str, Any]
) -> None:
    small = post(server, path, {**body_of(path, "x"), **wrong})
    large = post(server, path, {**body_of(path, "x" * LARGE_BODY_BYTES), **wrong})
    assert small == large and small[0] == 400


@pytest.mark.parametrize("raw", [b"[", b"[" * 200_000, b'"\xff"', b'{"model": "\\ud800"}'])
def test_what_is_no_json_is_the_same_too(server: Scripted, raw: bytes) -> None:
    url, headers = f"{server.url}/v1/chat/completions", {"Content-Type": "application/json"}
    said = []
    for body in (raw, raw + b" " * LARGE_BODY_BYTES):
        answer = httpx2.post(url, content=body, headers=headers)
        assert answer.status_code == 400
        said.append(answer.json()["error"]["message"].partition(" at ")[0])
    assert said[0] == said[1] and len(said[0]) > 5
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    large = httpx2.post(url, content=b"x" * 2 * LARGE_BODY_BYTES, headers=form)
    assert large.status_code == 415


def test_very_many_lists_and_objects_are_refused(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of them takes seconds to check. Beside the turns there are their list and the body."""
    monkeypatch.setattr(wire, "MAX_PARTS", 52)
    for num, want in ((50, 200), (51, 400)):
        turns = [{"role": "user", "content": "x"}] * num
        body = {"model": NAME, "messages": turns, "max_tokens": 1}
        status, answer = post(server, "/v1/chat/completions", body)
        assert status == want, answer
    assert "more than 52 lists and objects" in answer["error"]["message"]
