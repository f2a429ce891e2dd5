"""Wrong bodies, headers and parameters: a status, words, and a server that goes on."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from clients import NAME, Scripted
from pydantic import BaseModel, ValidationError

from hotset.server.chat import ChatBody
from hotset.server.completions import CompletionBody
from hotset.server.errors import problem_of_fields
from hotset.server.messages import MessageBody
from hotset.server.responses import ResponseBody

USER = [{"role": "user", "content": "hi"}]
CHAT = {"model": NAME, "messages": USER}


def post(server: Scripted, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Status and JSON; a body of bytes goes as it is."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx2.post(
        f"{server.url}{path}",
        content=content,
        headers={"content-type": "application/json", **headers},
        timeout=20,
    )
    return answer.status_code, answer.json()


def refused(server: Scripted, path: str = "/v1/chat/completions", **changes: Any) -> dict[str, Any]:
    """The error of a request that is right but for these fields."""
    status, body = post(server, path, {**CHAT, **changes})
    assert status == 400, body
    assert server.is_idle
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b"{}"],
    ids=lambda body: repr(body[:8]),
)
def test_bodies_that_are_none(server: Scripted, path: str, body: bytes) -> None:
    """SV-08."""
    status, answer = post(server, path, body)
    assert status == 400 and answer["error"]["message"]
    assert "Traceback" not in json.dumps(answer)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        "hi",
        [{"content": "hi"}],
        [{"role": "wizard", "content": "hi"}],
        [{"role": "assistant", "content": None}],
        [{"role": "user"}],
        [{"role": "tool", "content": "hi"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}],
        [{"role": "user", "content": "hi", "tool_calls": []}],
        [{"role": "user", "content": "hi", "surprise": 1}],
    ],
    ids=lambda messages: json.dumps(messages)[:40],
)
def test_messages_that_are_none(server: Scripted, messages: Any) -> None:
    """SV-09."""
    error = refused(server, messages=messages)
    assert error["type"] == "invalid_request_error" and error["param"].startswith("messages")


@pytest.mark.parametrize("name", ["messages", "model", "stop", "user", "\ud800"])
def test_half_a_character_is_no_text(server: Scripted, name: str) -> None:
    wrong: Any = [{"role": "user", "content": "\ud800"}] if name == "messages" else "\ud800"
    assert "surrogate" in refused(server, **{name: wrong})["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, 10**30])
def test_lengths_that_are_none(server: Scripted, name: str, value: object) -> None:
    """SV-07."""
    error = refused(server, **{name: value})
    assert error["param"] == name and f"`{name}`" in error["message"]


def test_longer_than_the_context(server: Scripted) -> None:
    """LC-01, LC-10: clients know the code; the next request is served."""
    error = refused(server, max_tokens=1_000_000)
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert "maximum context length is 4096 tokens" in error["message"]
    for path, name in (("/v1/completions", "prompt"), ("/v1/responses", "input")):
        _, body = post(server, path, {"model": NAME, name: "x" * 5000})
        found = body["error"]["code"], body["error"]["param"]
        assert found == ("context_length_exceeded", name)
    post_message = server.anthropic().messages.create
    for content, words in (
        ("x" * 5000, r"prompt is too long: \d+ tokens > 4096 maximum"),
        ("hi", r"`max_tokens` exceed context limit: \d+ \+ 5000 > 4096"),
    ):
        turn: Any = [{"role": "user", "content": content}]
        with pytest.raises(anthropic.BadRequestError, match=words) as info:
            post_message(model=NAME, messages=turn, max_tokens=5000)
        assert info.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert post(server, "/v1/chat/completions", CHAT)[0] == 200


@pytest.mark.parametrize("name", ["tools", "metadata", "nowhere"])
def test_a_deep_body_is_refused_whatever_reads_it(server: Scripted, name: str) -> None:
    """Templates and schemas are gone through by recursion, and end in an error of ours."""
    assert "nested deeper than 100" in refused(server, **{name: deep(150)})["message"]
    body = json.dumps({**CHAT, name: 0}).replace(": 0", ": " + "[" * 20_000 + "]" * 20_000)
    status, answer = post(server, "/v1/chat/completions", body.encode())
    assert status == 400 and "nested" in answer["error"]["message"]


def test_arguments_of_earlier_calls_are_json(server: Scripted) -> None:
    for arguments in ("{", "[]", '{"a": NaN}', json.dumps(deep(150)), '{"a":' * 20_000):
        function = {"name": "f", "arguments": arguments}
        turn = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
        error = refused(server, messages=[*USER, turn])
        assert error["param"] == "messages[1].tool_calls[0].function.arguments"


def deep(levels: int) -> Any:
    """Objects within each other."""
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def test_only_the_first_wrong_entry_is_looked_at() -> None:
    """A body of wrong entries took half a minute, in which nothing else was answered."""
    wrong: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (ChatBody, {"messages": [1] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text"}] * 1000}]}),
        (ChatBody, {"messages": USER, "tools": [1] * 1000}),
        (CompletionBody, {"prompt": [1.5] * 1000}),
        (CompletionBody, {"prompt": [[1.5] * 1000]}),
        (ResponseBody, {"input": [1] * 1000}),
        (ResponseBody, {"input": [{"type": "reasoning", "summary": [1] * 1000}]}),
        (MessageBody, {"messages": [{}] * 1000, "max_tokens": 1}),
        (MessageBody, {"messages": USER, "max_tokens": 1, "stop_sequences": [1] * 1000}),
    ]
    for body, fields in wrong:
        with pytest.raises(ValidationError) as info:
            body.model_validate({"model": NAME, **fields})
        assert info.value.error_count() <= 4, "one for each type that the field may have"


def test_an_object_of_very_many_names_is_none(server: Scripted) -> None:
    many = {f"name-{number}": 1 for number in range(10_001)}
    for changes in (many, {"metadata": many}, {"logit_bias": many}):
        assert "more than 10000 names" in refused(server, **changes)["message"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", {**CHAT, "stop": ["x"] * 17}, "`stop` must have at most 16 "),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 2**31}, "must be below 2147483648"),
        ("/v1/completions", {"model": NAME, "prompt": ["x"] * 17}, "`prompt` must have at most 16"),
        ("/v1/completions", {"model": NAME, "prompt": []}, "`prompt` must have at least 1 "),
        ("/v1/responses", {"model": NAME, "input": [1]}, "`input[0]` must be an object"),
        (
            "/v1/responses",
            {"model": NAME, "input": [{"content": ""}]},
            "`input[0].role` is missing",
        ),
        ("/v1/chat/completions", b'{"\xff": 1}', "the body is no JSON: it is not UTF-8"),
        (
            "/v1/chat/completions",
            {**CHAT, "tools": [{"type": "function", "function": {"name": "a b"}}]},
            "`tools[0].function.name` must match",
        ),
        (
            "/v1/messages",
            {
                "model": NAME,
                "max_tokens": 1,
                "messages": [{"role": "user", "content": [{"type": "text", "txt": "hi"}]}],
            },
            "`messages[0].content[0].text` is missing",
        ),
    ],
)
def test_the_field_is_named_as_it_was_sent(
    server: Scripted, path: str, body: Any, said: str
) -> None:
    status, answer = post(server, path, body)
    assert status == 400 and said in answer["error"]["message"], answer


def test_null_is_the_default(server: Scripted) -> None:
    status, body = post(server, "/v1/chat/completions", {**CHAT, "max_tokens": None, "stop": None})
    assert status == 200 and body["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [0, -1, 129, 1.5, "2"])
def test_choices_that_are_none(server: Scripted, value: object, stream: bool) -> None:
    """SV-13."""
    assert refused(server, n=value, stream=stream)["param"] == "n"


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("temperature", 101, None),
        ("temperature", "hot", None),
        ("top_p", 0, None),
        ("seed", 2**63, None),
        ("logit_bias", {"one": 1}, None),
        ("logit_bias", {"5": 101}, "logit_bias"),
        ("logit_bias", {"999999": 1}, "logit_bias"),
        ("top_logprobs", 2, None),
        ("stream_options", {"include_usage": True}, None),
        ("stop", [""], "stop"),
        ("stop", ["x"] * 17, None),
        ("response_format", {"type": "grammar"}, "response_format"),
        ("response_format", {"type": "json_schema"}, "response_format"),
        ("reasoning_effort", "high", None),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}, "chat_template"),
        ("chat_template_kwargs", {"messages": "x"}, "messages"),
        ("chat_template_kwargs", {"tokenize": False}, "tokenize"),
        ("audio", {"voice": "x"}, None),
        ("store", True, None),
        ("trust_remote_code", True, None),
        ("functions", [], None),
    ],
)
def test_parameters_are_refused_by_name(
    server: Scripted, name: str, value: object, param: str | None
) -> None:
    error = refused(server, **{name: value})
    assert error["param"].startswith(param or name)
    assert f"`{error['param']}" in error["message"]


def test_a_schema_that_is_none_is_named_by_its_parameter(server: Scripted) -> None:
    named = {"name": "x", "schema": {"type": "nothing"}}
    error = refused(server, response_format={"type": "json_schema", "json_schema": named})
    assert error["param"] == "response_format" and "Invalid type: nothing" in error["message"]
    body = {"model": NAME, "input": "hi", "text": {"format": {"type": "json_schema", **named}}}
    assert post(server, "/v1/responses", body)[1]["error"]["param"] == "text.format"


def test_what_changes_nothing_is_taken(server: Scripted) -> None:
    body = {**CHAT, "user": "me", "store": False, "service_tier": "auto", "metadata": {"a": "b"}}
    assert post(server, "/v1/chat/completions", body)[0] == 200


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(server: Scripted) -> None:
    status, body = post(
        server, "/v1/completions", {"model": NAME, "prompt": "x" * 5000, "max_tokens": 5}
    )
    assert status == 400
    assert "5001 prompt tokens and 5 new ones" in body["error"]["message"]
    assert "4096" in body["error"]["message"]


def test_what_a_template_refuses_is_said(server: Scripted) -> None:
    """SV-10."""
    error = refused(server, messages=[{"role": "tool", "tool_call_id": "c", "content": "rain"}])
    assert "a result follows its call" in error["message"]


def test_another_model_is_not_found(server: Scripted) -> None:
    with pytest.raises(openai.NotFoundError) as info:
        server.openai().chat.completions.create(model="gpt-6", messages=USER)  # type: ignore[arg-type]
    assert info.value.code == "model_not_found" and f"`{NAME}`" in info.value.message
    with pytest.raises(anthropic.NotFoundError):
        server.anthropic().messages.create(model="claude", messages=USER, max_tokens=1)  # type: ignore[arg-type]
    assert server.openai().chat.completions.create(model="alias", messages=USER).model == NAME  # type: ignore[arg-type]


def test_embeddings_are_refused(server: Scripted) -> None:
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        server.openai().embeddings.create(model=NAME, input="hi")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/chat/completions", 405), ("POST", "/v2/chat", 404), ("GET", "/v1/models/x", 404)],
)
def test_paths_and_methods(server: Scripted, method: str, path: str, status: int) -> None:
    answer = httpx2.request(method, f"{server.url}{path}")
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_a_large_body_is_refused_before_it_is_read(server: Scripted) -> None:
    """SV-08: 50 MB, with a length and without one."""

    def pieces() -> Any:
        for _ in range(50):
            yield b"x" * 2**20

    url = f"{server.url}/v1/chat/completions"
    for content in (b"x" * 50 * 2**20, pieces()):
        try:
            status = httpx2.post(url, content=content, timeout=20).status_code
        except (httpx2.WriteError, httpx2.ReadError):  # it was cut off while it was sent
            status = 413
        assert status == 413
    assert post(server, "/v1/chat/completions", CHAT)[0] == 200


def test_large_headers_are_refused(server: Scripted) -> None:
    answer = httpx2.get(f"{server.url}/health", headers={"x-large": "x" * 2**15})
    assert answer.status_code in (400, 431)


def test_a_form_of_another_site_is_no_request(server: Scripted) -> None:
    """A browser sends it without asking first, but only as a form or as plain text."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        status, body = post(server, "/v1/chat/completions", CHAT, **{"content-type": kind})
        assert status == 415
        said = f"the header `Content-Type` is `{kind}`, it must be `application/json`"
        assert body["error"]["message"] == said


def test_words_that_are_no_http(server: Scripted) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for data in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(data)
            assert connection.recv(1000).startswith(b"HTTP/1.1 4")
    assert httpx2.get(f"{server.url}/health").status_code == 200


# What a library says of a body, and nobody else.
LIBRARY_WORDS = re.compile(
    r"pydantic|[Ii]nput should|[Ii]nput tag|[Vv]alidation|Value error|Field required|Extra input"
    r"|valid (?:string|integer|number|list|dictionary|boolean)|discriminator|NoneType"
)
WRONG: list[Any] = [True, -1, 1.5, 10**30, "", "x" * 2000, [], [1], {"type": "x"}]


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponseBody, MessageBody])
def test_errors_are_in_our_words(body: type[BaseModel]) -> None:
    """Every field with every kind of value, within lists and objects too."""
    right = {"model": NAME, "messages": USER, "prompt": "hi", "input": "hi", "max_tokens": 1}
    base = {name: value for name, value in right.items() if name in body.model_fields}
    body.model_validate(base)
    num_refused = 0
    for name in body.model_fields:
        nested = [[value] for value in WRONG] + [{"type": value} for value in WRONG]
        for value in (*WRONG, *nested, *[[{"role": "user", "content": w}] for w in WRONG]):
            wrong = {**base, name: value}
            try:
                body.model_validate(wrong)
            except ValidationError as error:
                problem, num_refused = problem_of_fields(error.errors(), wrong), num_refused + 1
                words = LIBRARY_WORDS.search(problem.message)
                assert not words and "a value that it cannot have" not in problem.message, problem
    assert num_refused > 100 and LIBRARY_WORDS.search("Input should be a valid string"), "control"
