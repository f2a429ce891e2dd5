"""The tests of hotset's server that ask as clients do, asked of vLLM's with hotset's experts.

They are the same functions. Left out are those that look into hotset's own scheduler or at its
words; of errors, status and the client's type are compared. Where vLLM differs is said in `OTHER`,
and held: a difference that goes away fails here.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest
from clients import NAME

import server.test_wrong_requests as wrong
from server.test_chat import (  # noqa: F401 - they are run from here
    HELLO,
    test_a_stream_is_the_same_in_pieces,
    test_a_whole_answer,
    test_characters_over_tokens,
    test_length,
    test_stop_strings,
    test_usage_comes_last_when_it_is_asked_for,
)
from server.test_messages import (  # noqa: F401
    test_a_stream_adds_up_to_the_same,
    test_a_whole_message,
    test_asynchronous,
    test_blocks_of_a_conversation_reach_the_template,
    test_how_a_message_ends,
)
from server.test_responses import (  # noqa: F401
    test_a_response_that_is_cut_off,
    test_a_whole_response,
    test_events_of_a_stream_add_up,
    test_items_of_a_conversation,
    test_the_clients_own_accumulator_agrees,
)
from server.test_tools import (  # noqa: F401
    test_calls_of_a_chat,
    test_calls_of_a_message,
    test_calls_of_a_response,
    test_no_tools_no_calls,
    test_one_call_where_no_more_are_wanted,
)
from server.test_wrong_requests import (  # noqa: F401
    test_bodies_that_are_none,
    test_null_is_the_default,
    test_words_that_are_no_http,
)

if TYPE_CHECKING:
    from scripted_vllm import InVllm

# Tests, as pytest names them -> what the server of vLLM 0.32 does instead.
OTHER = {
    r"test_characters_over_tokens\[.*-2-.*": "leaves out a character that was cut off",
    r"test_(a_whole_response|items_of_a_conversation)": "begins a response's prompt with two BOS",
    r"test_a_response_that_is_cut_off": "ends such a stream as one that is complete",
    r"test_one_call_where_no_more_are_wanted": "fails with `parallel_tool_calls=False`",
    r"test_bodies_that_are_none\[b'\[\[.*": "has no JSON for the error of a body nested too deep",
    r"test_messages_that_are_none\[.*(wizard|null|user\"\}|tool\]|surp).*": "takes what renders",
    r"test_parameters_are_refused\[(audio|store|trust_remote_code|functions)-.*": "takes any field",
    r"test_parameters_are_refused\[logit_bias-.*5-.*": "cuts off a bias that is too large",
    r"test_parameters_are_refused\[reasoning_effort-.*": "takes what the template does not know",
    r"test_parameters_are_refused\[.*-tokenize\]": "leaves out what the template must not be told",
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InVllm]:
    """One server for all tests here."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed (requirements-vllm.txt)")
    from scripted_vllm import serving

    with serving(tmp_path_factory.mktemp("scripted")) as server:
        yield server


@pytest.fixture
def server(running: InVllm, request: pytest.FixtureRequest) -> InVllm:
    """It says "Hello" at the beginning of each test."""
    for pattern, reason in OTHER.items():
        if re.fullmatch(pattern, request.node.name, re.DOTALL):
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    running.say("Hello")
    return running


def same_cases(test: Any) -> pytest.MarkDecorator:
    """The cases of a test of hotset's server."""
    (cases,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
    return pytest.mark.parametrize(*cases.args, **cases.kwargs)


def check_refused(server: InVllm, **changes: Any) -> None:
    """A request that is right but for these fields has a status of 400, and nothing runs."""
    status, body = wrong.post(server, "/v1/chat/completions", {**wrong.CHAT, **changes})
    assert status == 400, body
    assert body["error"]["message"] and "Traceback" not in str(body)
    assert server.is_idle


@same_cases(wrong.test_messages_that_are_none)
def test_messages_that_are_none(server: InVllm, messages: Any) -> None:
    check_refused(server, messages=messages)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "5x", 10**30])
def test_lengths_that_are_none(server: InVllm, name: str, value: object) -> None:
    check_refused(server, **{name: value})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_choices_that_are_none(server: InVllm, value: object, stream: bool) -> None:
    check_refused(server, n=value, stream=stream)


@same_cases(wrong.test_parameters_are_refused_by_name)
def test_parameters_are_refused(
    server: InVllm, name: str, value: object, param: str | None
) -> None:
    check_refused(server, **{name: value})


@same_cases(wrong.test_paths_and_methods)
def test_paths_and_methods(server: InVllm, method: str, path: str, status: int) -> None:
    assert httpx2.request(method, f"{server.url}{path}").status_code == status


def test_errors_have_the_clients_types(server: InVllm) -> None:
    chat = server.openai().chat.completions
    with pytest.raises(openai.NotFoundError):
        chat.create(model="another", messages=HELLO)
    for changes in ({"max_tokens": 1_000_000}, {"temperature": -1.0}):
        with pytest.raises(openai.BadRequestError):
            chat.create(model=NAME, messages=HELLO, **changes)
    long: Any = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(openai.BadRequestError, match="4096"):
        chat.create(model=NAME, messages=long)
    assert chat.create(model="alias", messages=HELLO).choices[0].message.content == "Hello"


def test_a_running_server_is_verified(server: InVllm) -> None:
    """As the guide says to ask for it; and its experts have run."""
    server.openai().chat.completions.create(model=NAME, messages=HELLO)

    def ask(method: str) -> Any:
        answer = httpx2.post(f"{server.url}/collective_rpc", json={"method": method}, timeout=60)
        return answer.json()["results"]

    assert ask("hotset_verify") == [[]]
    (traffic,) = ask("hotset_traffic")
    assert traffic["hits"] > 0 and traffic["fills"] > 0
