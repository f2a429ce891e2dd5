"""What coding agents and chat programs send beside the question: it is taken, and changes nothing
of an answer but what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from clients import NAME, Scripted

from hotset.server import sse
from hotset.server.ask import Message
from hotset.server.system_turns import PROBE, placed, shows_all

USER: Any = [{"role": "user", "content": "Weather?"}]
CALL: Any = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RESULT: Any = {"role": "tool", "tool_call_id": "c", "content": "rain"}


def prompt_of(server: Scripted) -> str:
    return server.served.text.decode(server.scheduler.last.prompt_ids, keep_special=True)


@pytest.mark.parametrize(
    "noise",
    [
        # The client's own object of an answer, with every field that it knows.
        {"function_call": None, "audio": None, "refusal": None, "annotations": []},
        {"reasoning_content": None, "provider_specific_fields": {"refusal": None}},
    ],
)
def test_an_answer_goes_back_as_a_client_kept_it(server: Scripted, noise: dict[str, Any]) -> None:
    chat = server.openai().chat.completions
    plain: Any = [*USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]
    chat.create(model=NAME, messages=plain)
    want = prompt_of(server)
    kept = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}], **noise}
    messages: Any = [*USER, kept, RESULT]
    chat.create(model=NAME, messages=messages)
    assert prompt_of(server) == want
    said: Any = {"role": "assistant", "content": "Rain.", "tool_calls": [], **noise}
    chat.create(model=NAME, messages=[*USER, said, *USER])
    assert "Rain." in prompt_of(server) and "<tool_call>" not in prompt_of(server)


def test_marks_of_caches_are_no_text(server: Scripted) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    part: Any = {"type": "text", "text": "Weather?", **mark}
    tool: Any = {"type": "function", "function": {"name": "weather", "strict": None}, **mark}
    server.openai().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": [part]}], tools=[tool]
    )
    assert "Weather?" in prompt_of(server) and "ephemeral" not in prompt_of(server)


def test_usual_effort_asks_for_nothing(server: Scripted) -> None:
    """What each API does without a word; `test_tools` has efforts that a template cannot follow."""
    client, said = server.openai(), "Weather?"
    client.chat.completions.create(model=NAME, messages=USER, reasoning_effort="medium")
    client.responses.create(
        model=NAME,
        input=said,
        reasoning={"effort": "medium", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        extra_body={"client_metadata": {"session": "1"}},
    )
    server.anthropic().messages.create(
        model=NAME, messages=USER, max_tokens=9, output_config={"effort": "high"}
    )
    assert prompt_of(server).count(said) == 1


def test_instructions_in_the_middle_of_a_conversation(server: Scripted) -> None:
    """Claude Code since 2.1.154; the template of these tests refuses what is no first message."""
    late: Any = {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}
    server.anthropic().messages.create(
        model=NAME,
        max_tokens=9,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[*USER, late, {"role": "assistant", "content": "Rain."}, *USER],
        tools=[
            {
                "name": "weather",
                "input_schema": {"type": "object"},
                "defer_loading": False,
                "eager_input_streaming": True,
            }
        ],
    )
    prompt = prompt_of(server)
    assert "<start>system\nBe brief.<end>" in prompt
    assert "<start>user\nWeather?\n\nBe kind.<end>\n<start>assistant\nRain." in prompt
    wrong: Any = {"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\].content\[0\]"):
        server.anthropic().messages.create(model=NAME, max_tokens=9, messages=[*USER, wrong])


def test_instructions_of_codex(server: Scripted) -> None:
    """Beside `instructions` it sends messages of `developer`, some of them late."""
    items: Any = [
        {"type": "message", "role": "developer", "content": "Ask first."},
        {"type": "message", "role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {"type": "message", "role": "developer", "content": "Be kind."},
    ]
    server.openai().responses.create(model=NAME, instructions="Be brief.", input=items)
    prompt = prompt_of(server)
    assert "<start>system\nBe brief.\n\nAsk first.<end>" in prompt
    assert prompt.index("rain<end>") < prompt.index("<start>user\nBe kind.<end>")


def turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def test_a_template_with_a_place_for_them_gets_them_as_they_came() -> None:
    asked: list[bool] = []

    def anywhere() -> bool:
        asked.append(True)
        return True

    usual = [turn("system", "a"), turn("user", "b")]
    assert placed(usual, anywhere=anywhere) is usual and not asked, "nothing to ask for"
    late = [*usual, turn("system", "c")]
    assert placed(late, anywhere=anywhere) is late and asked
    assert placed(late, anywhere=lambda: False) == [usual[0], turn("user", "b\n\nc")], "control"
    rendered = " ".join(message["content"] for message in PROBE)
    assert shows_all(rendered) and not shows_all(rendered.replace("late", ""))


def test_a_long_silence_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the time, an event that never comes leaves one to be told so."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.0)

    async def silent() -> AsyncIterator[str]:
        await asyncio.Event().wait()
        yield "never"

    async def first(**options: Any) -> Any:
        stream = sse.EventStream(silent(), on_end=lambda: None, **options)
        pieces = stream.body_iterator
        try:
            return await anext(aiter(pieces))
        finally:
            await pieces.aclose()  # type: ignore[union-attr]

    assert asyncio.run(first()) == sse.COMMENT
    assert asyncio.run(first(keep_alive="event: ping\n\n")) == "event: ping\n\n"


def test_what_claude_code_bills_by_is_no_prompt(server: Scripted) -> None:
    """It differs from request to request, and no prefix of the prompt would be the same."""
    prompts = []
    for mark in ("fa690", "0b111"):
        billing: Any = {"type": "text", "text": f"x-anthropic-billing-header: cch={mark};"}
        said: Any = {"type": "text", "text": "Be brief."}
        server.anthropic().messages.create(
            model=NAME, max_tokens=9, system=[billing, said], messages=USER
        )
        prompts.append(prompt_of(server))
    assert prompts[0] == prompts[1] and "<start>system\nBe brief.<end>" in prompts[0]


SPACE: Any = {
    "type": "namespace",
    "name": "mcp__maps__",
    "description": "Maps of a city.",
    "tools": [
        {"type": "function", "name": "find", "description": "A place.", "parameters": {}},
        {"type": "function", "name": "route", "strict": False},
    ],
}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_in_a_namespace(server: Scripted, stream: bool) -> None:
    """Codex's tools of MCP servers: one flat list for the model, two names for the client."""
    server.say('<tool_call>\n{"name": "mcp__maps__find", "arguments": {"a": 1}}\n</tool_call>')
    plain: Any = {"type": "function", "name": "find", "parameters": {"type": "object"}}
    earlier: Any = [
        {"role": "user", "content": "Where?"},
        {
            **{"type": "function_call", "call_id": "c", "arguments": "{}"},
            **{"namespace": "mcp__maps__", "name": "route"},
        },
        {"type": "function_call_output", "call_id": "c", "output": "left"},
    ]
    options: Any = {"model": NAME, "input": earlier, "tools": [plain, SPACE]}
    responses = server.openai().responses
    if stream:
        with responses.stream(**options) as events:
            done = [event for event in events if event.type == "response.output_item.done"]
        item: Any = done[-1].item
    else:
        item = responses.create(**options).output[-1]
    assert (item.namespace, item.name, item.arguments) == ("mcp__maps__", "find", '{"a": 1}')
    prompt = prompt_of(server)
    assert '"name": "find"' in prompt and "Maps of a city.\\nA place." in prompt
    assert prompt.count("Maps of a city.") == 1 and '{"name": "mcp__maps__route"' in prompt


def test_tools_that_would_share_a_name_are_refused(server: Scripted) -> None:
    twice: Any = {"type": "function", "name": "mcp__maps__find"}
    for tools in ([SPACE, twice], [twice, twice]):
        with pytest.raises(openai.BadRequestError, match=r"tools\[1\]"):
            server.openai().responses.create(model=NAME, input="Where?", tools=tools)


def test_what_another_server_sealed_is_left_out(server: Scripted) -> None:
    """A conversation goes on here that began elsewhere."""
    blocks: Any = [
        {"type": "redacted_thinking", "data": "c2VhbGVk"},
        {"type": "text", "text": "Rain.", "citations": None},
    ]
    turns: Any = [*USER, {"role": "assistant", "content": blocks}, *USER]
    server.anthropic().messages.create(
        model=NAME, max_tokens=9, messages=turns, extra_body={"mcp_servers": []}
    )
    assert "<start>assistant\nRain.<end>" in prompt_of(server) and "c2Vh" not in prompt_of(server)
    items: Any = [
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "c2VhbGVk"},
        {"type": "message", "role": "assistant", "content": "Rain.", "phase": "final_answer"},
        *USER,
    ]
    server.openai().responses.create(
        model=NAME, input=items, top_logprobs=0, prompt_cache_retention="24h"
    )
    assert "Rain.<end>" in prompt_of(server) and "c2Vh" not in prompt_of(server)


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/health", 200), ("/v1/messages", 405)])
def test_probes_that_want_the_head_only(server: Scripted, path: str, status: int) -> None:
    answer = httpx2.head(f"{server.url}{path}")
    assert answer.status_code == status and not answer.content
    whole = httpx2.get(f"{server.url}{path}")
    assert answer.headers["content-type"] == whole.headers["content-type"]
