"""`/v1/messages` through Anthropic's own client: whole, streamed, asynchronous, counted."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest
from clients import NAME, Scripted

HELLO: Any = [{"role": "user", "content": "Say hello"}]
TOOLS: Any = [
    {
        "name": "weather",
        "description": "Of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


def test_a_whole_message(server: Scripted) -> None:
    done = server.anthropic().messages.create(
        model=NAME, messages=HELLO, max_tokens=50, system="Be brief"
    )
    assert [block.type for block in done.content] == ["text"] and text_of(done) == "Hello"
    assert (done.stop_reason, done.stop_sequence, done.role) == ("end_turn", None, "assistant")
    prompt = server.served.text.encode_chat([{"role": "system", "content": "Be brief"}, *HELLO])
    assert done.usage.input_tokens == len(prompt)
    assert done.usage.output_tokens == 5 + server.end_tokens


def test_a_stream_adds_up_to_the_same(server: Scripted) -> None:
    with server.anthropic().messages.stream(model=NAME, messages=HELLO, max_tokens=50) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert pieces == list("Hello") and text_of(final) == "Hello"
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == 5 + server.end_tokens


@pytest.mark.parametrize(
    ("options", "text", "reason", "stop"),
    [
        ({"max_tokens": 2}, "He", "max_tokens", None),
        ({"max_tokens": 9, "stop_sequences": ["lo", "x"]}, "Hel", "stop_sequence", "lo"),
    ],
)
def test_how_a_message_ends(
    server: Scripted, options: dict[str, Any], text: str, reason: str, stop: str | None
) -> None:
    client = server.anthropic().messages
    with client.stream(model=NAME, messages=HELLO, **options) as stream:
        streamed = stream.get_final_message()
    for done in (client.create(model=NAME, messages=HELLO, **options), streamed):
        assert (text_of(done), done.stop_reason, done.stop_sequence) == (text, reason, stop)


def test_asynchronous(server: Scripted) -> None:
    async def ask() -> str:
        options: Any = {"model": NAME, "messages": HELLO, "max_tokens": 50}
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client,
            client.messages.stream(**options) as stream,
        ):
            return await stream.get_final_text()

    assert asyncio.run(ask()) == "Hello"


def test_blocks_of_a_conversation_reach_the_template(server: Scripted) -> None:
    history: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "look it up", "signature": "x"},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {
                    "type": "text",
                    "text": "And now?",
                    "cache_control": {"type": "ephemeral"},
                },
            ],
        },
    ]
    counted = server.anthropic().messages.count_tokens(model=NAME, messages=history, tools=TOOLS)
    plain = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "look it up",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bonn"}}}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "t1"},
        {"role": "user", "content": "And now?"},
    ]
    function = {
        "name": "weather",
        "parameters": TOOLS[0]["input_schema"],
        "description": "Of a city",
    }
    tools = [{"type": "function", "function": function}]
    assert counted.input_tokens == len(server.served.text.encode_chat(plain, tools=tools))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 4}}, "thinking.budget_tokens"),
        ({"extra_body": {"context_management": {"edits": [{"type": "x"}]}}}, "context_management"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "Well"}]}, "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"container": "x"}, "container"),
    ],
)
def test_what_is_refused_has_the_shape_of_this_api(
    server: Scripted, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as info:
        options = {"model": NAME, "messages": HELLO, "max_tokens": 5, **changes}
        server.anthropic().messages.create(**options)
    assert isinstance(info.value.body, dict) and info.value.body["type"] == "error"
    assert info.value.body["error"]["type"] == "invalid_request_error"
    assert named in info.value.body["error"]["message"]


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")
