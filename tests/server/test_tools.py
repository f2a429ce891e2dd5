"""Calls of tools and reasoning through both clients, whole and streamed; the model is scripted."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from clients import NAME, Scripted, allows

from hotset.runtime.text import Text

MESSAGES: Any = [{"role": "user", "content": "Weather in Bonn and Köln?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
)
PLAIN = f"Let me look.\n{CALLS}"
SAID = f"<think>Two cities.</think>{PLAIN}"
CITIES = [{"city": "Bonn"}, {"city": "Köln"}]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_a_chat(server: Scripted, stream: bool) -> None:
    """SV-15: each byte is a token, so every mark comes in pieces."""
    server.say(SAID if server.thinks else PLAIN)
    client = server.openai().chat.completions
    options: Any = {"model": NAME, "messages": MESSAGES, "tools": TOOLS}
    if stream:
        content, reasoning, calls, reason = "", "", {}, None
        for chunk in client.create(**options, stream=True):
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                known = calls.setdefault(call.index, {"id": call.id, "name": "", "arguments": ""})
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
            reason = choice.finish_reason or reason
        made = [(call["id"], call["name"], call["arguments"]) for call in calls.values()]
    else:
        (choice,) = client.create(**options).choices
        content, reason = choice.message.content or "", choice.finish_reason
        reasoning = getattr(choice.message, "reasoning_content", None) or ""
        found = choice.message.tool_calls or []
        made = [(call.id, call.function.name, call.function.arguments) for call in found]
    assert (content.strip(), reason) == ("Let me look.", "tool_calls")
    assert reasoning == ("Two cities." if server.thinks else "")
    assert [(name, json.loads(text)) for _, name, text in made] == [
        ("weather", city) for city in CITIES
    ]
    assert len({call_id for call_id, _, _ in made}) == 2


def test_one_call_where_no_more_are_wanted(server: Scripted) -> None:
    server.say(SAID if server.thinks else PLAIN)
    (choice,) = (
        server.openai()
        .chat.completions.create(
            model=NAME, messages=MESSAGES, tools=TOOLS, parallel_tool_calls=False
        )
        .choices
    )
    assert choice.message.tool_calls is not None and len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    server.ended()


FORCED: Any = [
    *TOOLS,
    {"type": "function", "function": {"name": "news", "parameters": {"type": "object"}}},
]
ONE_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "text", "is_allowed"),
    [
        ("required", ONE_CALL, True),
        ("required", CALLS, True),
        ("required", ONE_CALL.replace("weather", "news"), True),
        ("required", ONE_CALL.replace("Bonn", "").replace("city", "town"), False),
        ("required", "It rains.", False),
        ("required", "", False),
        ("weather", ONE_CALL, True),
        ("weather", CALLS, False),
        ("weather", ONE_CALL.replace("weather", "news"), False),
    ],
)
def test_a_call_that_must_be_made(
    server: Scripted, choice: str, text: str, is_allowed: bool
) -> None:
    server.say(ONE_CALL)
    wanted: Any = choice
    if choice != "required":
        wanted = {"type": "function", "function": {"name": choice}}
    done = server.openai().chat.completions.create(
        model=NAME, messages=MESSAGES, tools=FORCED, tool_choice=wanted
    )
    assert done.choices[0].finish_reason == "tool_calls"
    matcher = server.scheduler.last.matcher
    assert matcher is not None and allows(matcher, text) == is_allowed


def test_calls_that_cannot_be_forced_are_refused(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, named = server.openai().chat.completions, {"type": "function"}
    for extra, words in (
        ({"tool_choice": "required"}, "there are no `tools`"),
        ({"tools": TOOLS, "tool_choice": {**named, "function": {"name": "news"}}}, "no such tool"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            client.create(model=NAME, messages=MESSAGES, **extra)  # type: ignore[call-overload]
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "a+"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    monkeypatch.setattr(Text, "chat_template", "{{ tools }} <tool_call> <function=")
    with pytest.raises(openai.BadRequestError, match="cannot be held to `pattern`"):
        client.create(model=NAME, messages=MESSAGES, tools=tools, tool_choice="required")  # type: ignore[call-overload]
    monkeypatch.setattr(Text, "chat_template", "{{ tools }} <think>")
    with pytest.raises(openai.BadRequestError, match="calls `tools` is not known"):
        client.create(model=NAME, messages=MESSAGES, tools=TOOLS, tool_choice="required")


def test_no_tools_no_calls(server: Scripted) -> None:
    """What looks like a call is text when nothing may be called."""
    server.say(CALLS)
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        done = server.openai().chat.completions.create(model=NAME, messages=MESSAGES, **extra)  # type: ignore[call-overload]
        assert done.choices[0].message.tool_calls is None
        assert "Bonn" in done.choices[0].message.content
        assert done.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_a_message(server: Scripted, stream: bool) -> None:
    server.say(SAID if server.thinks else PLAIN)
    options: Any = {
        "model": NAME,
        "messages": MESSAGES,
        "max_tokens": 2000,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
    }
    client = server.anthropic().messages
    if stream:
        with client.stream(**options) as events:
            done = events.get_final_message()
    else:
        done = client.create(**options)
    thoughts = [block.thinking for block in done.content if block.type == "thinking"]
    assert thoughts == ["Two cities."] * server.thinks
    kinds = [block.type for block in done.content[len(thoughts) :]]
    assert kinds == ["text", "tool_use", "tool_use"]
    assert done.stop_reason == "tool_use"
    assert [block.input for block in done.content if block.type == "tool_use"] == CITIES


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_a_response(server: Scripted, stream: bool) -> None:
    server.say(SAID if server.thinks else PLAIN)
    options: Any = {
        "model": NAME,
        "input": MESSAGES,
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
    }
    client = server.openai().responses
    if stream:
        with client.stream(**options) as events:
            done = events.get_final_response()
    else:
        done = client.create(**options)
    kinds = [item.type for item in done.output]
    assert kinds == ["reasoning"] * server.thinks + ["message", "function_call", "function_call"]
    calls = [item for item in done.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == CITIES


def test_a_template_without_thinking_says_so(server: Scripted) -> None:
    """A switch that is there works, one that is not is refused by name."""
    client, body = server.openai().chat.completions, {"model": NAME, "messages": MESSAGES}
    options = {"enable_thinking": False}
    client.create(**body, extra_body={"chat_template_kwargs": options})  # type: ignore[call-overload]
    assert server.served.text.decode(server.scheduler.last.prompt_ids).endswith("</think>\n\n")
    server.anthropic().messages.create(
        model=NAME, messages=MESSAGES, max_tokens=9, thinking={"type": "disabled"}
    )
    assert server.served.text.decode(server.scheduler.last.prompt_ids).endswith("</think>\n\n")
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        client.create(**body, reasoning_effort="high")  # type: ignore[call-overload]
    with pytest.raises(anthropic.BadRequestError, match="reasoning_effort"):
        server.anthropic().messages.create(
            model=NAME, messages=MESSAGES, max_tokens=9, output_config={"effort": "max"}
        )


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_what_was_reused_and_what_was_thought(server: Scripted, stream: bool) -> None:
    """Under each API's names; a byte is a token, and the marks around the reasoning count to it."""
    server.say("<think>Hm.</think>Yes.")
    server.scheduler.num_prefix_tokens = 5
    body: Any = {"model": NAME, "messages": MESSAGES}
    num_prompt = len(server.served.text.encode_chat(MESSAGES))
    chat = server.openai().chat.completions
    if stream:
        *_, last = chat.create(**body, stream=True, stream_options={"include_usage": True})
        used = last.usage
        with server.anthropic().messages.stream(**body, max_tokens=99) as events:
            said = events.get_final_message().usage
        with server.openai().responses.stream(model=NAME, input=MESSAGES) as items:
            responded = items.get_final_response().usage
    else:
        used = chat.create(**body).usage
        said = server.anthropic().messages.create(**body, max_tokens=99).usage
        responded = server.openai().responses.create(model=NAME, input=MESSAGES).usage
    num_thought = len("<think>Hm.</think>") - len("<think")  # its mark is none before it is whole
    assert used.prompt_tokens == num_prompt and used.prompt_tokens_details.cached_tokens == 5
    assert used.completion_tokens_details.reasoning_tokens == num_thought
    assert (said.input_tokens, said.cache_read_input_tokens) == (num_prompt - 5, 5)
    assert said.output_tokens_details.thinking_tokens == num_thought
    assert responded.input_tokens_details.cached_tokens == 5
    assert responded.output_tokens_details.reasoning_tokens == num_thought
    server.scheduler.num_prefix_tokens = 0
