"""Calls as models are known to write them, beside what their templates print: parsers of other
servers are tested with such answers. Whole, and in pieces of every length."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_parsers import FAMILIES, HARMONY, joined, parser_of

from hotset.server.parsers.registry import find_form

TOOLS: dict[str, Any] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "metric": {"type": "string"}}},
    "register": {
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "address": {"type": "object"},
            "tested": {"type": "boolean"},
            "role": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "aliases": {"type": "array"},
        }
    },
    "now": {},
}
OSLO = ("get_weather", {"city": "Oslo"})
LLAMA_JSON, LLAMA_PYTHON = '<|header_start|> "parameters"', "<|header_start|>"
LFM2 = "<think> <|tool_call_start|>"
MISTRAL = "[TOOL_CALLS] [ARGS]"
QWEN, GLM, MINIMAX, KIMI, GEMMA, GRANITE, HUNYUAN = (
    FAMILIES[name][0]
    for name in ("qwen xml", "glm 4.5", "minimax", "kimi", "gemma 4", "granite 3", "hunyuan")
)
VALUES = {
    "name": "Doe",
    "age": 9,
    "address": {"city": "Oslo", "home": True},
    "tested": True,
    "role": None,
    "aliases": ["J", 1, None],
}
PYTHON = (
    "name='Doe', age=9, address={'city': 'Oslo', 'home': True}, tested=True, role=None, "
    "aliases=['J', 1, None]"
)
QWEN_CALL = "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"


def qwen(name: str, /, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


ANSWERS: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "llama 4, python's values": (LLAMA_PYTHON, f"[register({PYTHON})]", [("register", VALUES)]),
    "llama 4, quotes in a text": (
        LLAMA_PYTHON,
        r"[get_weather(city='Martha\'s Vineyard', metric='\"cool\"')]",
        [("get_weather", {"city": "Martha's Vineyard", "metric": '"cool"'})],
    ),
    "llama 4, two without a space, no end": (
        LLAMA_PYTHON,
        "<|python_start|>[get_weather(city='Oslo'),now()]",
        [OSLO, ("now", {})],
    ),
    "llama 4, several lines in a text": (
        LLAMA_PYTHON,
        "[get_weather(city='a\nb')]",
        [("get_weather", {"city": "a\nb"})],
    ),
    "llama 4, nothing between the marks": (
        LLAMA_PYTHON,
        "<|python_start|><|python_end|>[get_weather(city='Oslo')]",
        [OSLO],
    ),
    "llama 4, JSON side by side as its template prints it": (
        LLAMA_JSON,
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}{"name": "now", "parameters": {}}',
        [OSLO, ("now", {})],
    ),
    "llama 4, JSON on lines of their own": (
        LLAMA_JSON,
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}\n'
        '{"name": "now", "parameters": {}}',
        [OSLO, ("now", {})],
    ),
    "llama 4, JSON that says its type": (
        LLAMA_JSON,
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}}',
        [OSLO],
    ),
    "lfm2": (
        LFM2,
        "<|tool_call_start|>[get_weather(city='Oslo'), now()]<|tool_call_end|>",
        [OSLO, ("now", {})],
    ),
    "lfm2, a command of several lines": (
        LFM2,
        "<|tool_call_start|> [get_weather(city='cat << E\n[\"]\nE')]<|tool_call_end|>",
        [("get_weather", {"city": 'cat << E\n["]\nE'})],
    ),
    "mistral v11": (MISTRAL, '[TOOL_CALLS]get_weather{"city": "Oslo"}', [OSLO]),
    "mistral v13, two": (
        MISTRAL,
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}',
        [OSLO, ("now", {})],
    ),
    "qwen, what its template prints for python's values": (
        QWEN,
        qwen(
            "register",
            name="Doe",
            age="9",
            address="{'city': 'Oslo', 'home': True}",
            tested="True",
            role="None",
            aliases='["J", 1, null]',
        ),
        [("register", VALUES)],
    ),
    "qwen, the closing tag in a text": (
        QWEN,
        qwen("get_weather", city="<a>\n</parameter>\n</function> b", metric="C"),
        [("get_weather", {"city": "<a>\n</parameter>\n</function> b", "metric": "C"})],
    ),
    "qwen, without the outer marks": (QWEN, f"{QWEN_CALL}\n</tool_call>", [OSLO]),
    "qwen, two without any outer mark": (QWEN, f"{QWEN_CALL}\n{QWEN_CALL}", [OSLO, OSLO]),
    "qwen, without the last mark": (QWEN, f"<tool_call>\n{QWEN_CALL}\n", [OSLO]),
    "qwen, two in one piece": (QWEN, f"{qwen('get_weather', city='Oslo')}\n" * 2, [OSLO, OSLO]),
    "qwen, no parameters": (QWEN, qwen("now"), [("now", {})]),
    "glm, no arguments": (GLM, "<tool_call>now\n</tool_call>", [("now", {})]),
    "glm, the closing tag in a text": (
        GLM,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value></arg_value> x</arg_value>\n"
        "<arg_key>metric</arg_key>\n<arg_value>C</arg_value>\n</tool_call>",
        [("get_weather", {"city": "</arg_value> x", "metric": "C"})],
    ),
    "minimax, two in one block": (
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>'
        '\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [OSLO, ("now", {})],
    ),
    "granite 3.1, its other spelling, the name last": (
        GRANITE,
        '<tool_call> [\n{"name": "get_weather", "arguments": {"city": "Oslo"}},\n'
        '{"arguments": {}, "name": "now"}\n]',
        [OSLO, ("now", {})],
    ),
    "hunyuan, an end of the answer behind it": (
        HUNYUAN,
        '<tool_calls>[{"name": "now", "arguments": {}}, '
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>\n</answer>',
        [("now", {}), OSLO],
    ),
    "kimi, space about the id, no namespace": (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>get_weather:0 \n"
        '<|tool_call_argument_begin|>{\n "city": "Oslo"\n} <|tool_call_end|>'
        "<|tool_calls_section_end|>",
        [OSLO],
    ),
    "gemma, a text without its marks": (
        GEMMA,
        "<|tool_call>call:get_weather{city:New York,metric:C}<tool_call|>",
        [("get_weather", {"city": "New York", "metric": "C"})],
    ),
    "gemma, keys between marks, null": (
        GEMMA,
        '<|tool_call>call:register{address:{<|"|>3<|"|>:{a:<|"|>}]<|"|>}},role:null}<tool_call|>',
        [("register", {"address": {"3": {"a": "}]"}}, "role": None})],
    ),
    "harmony, recipient before the channel": (
        HARMONY,
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Oslo"}<|call|>',
        [OSLO],
    ),
    "harmony, no namespace": (
        HARMONY,
        '<|channel|>commentary to=get_weather<|message|>{"city": "Oslo"}',
        [OSLO],
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_as_models_write_them(name: str) -> None:
    template, answer, want = ANSWERS[name]
    for size in range(1, len(answer) + 1):
        chunks = [answer[at : at + size] for at in range(0, len(answer), size)]
        reasoning, content, calls = joined(parser_of(template, tools=TOOLS), chunks)
        assert (reasoning, content.strip(), calls) == ("", "", want), f"in pieces of {size}"
    others = {"other": {}}
    _, text, none = joined(parser_of(template, tools=others), [answer])
    assert not none and ("Oslo" in text) == ("Oslo" in answer), "control: no such tool, no call"


THINKING = [name for name, (template, _, _) in ANSWERS.items() if "<think>" in template]


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_and_words_before_them(name: str) -> None:
    template, answer, want = ANSWERS[name]
    text = f"<think>\nLet me see.\n</think>\n\nSoon.\n{answer}"
    assert joined(parser_of(template, tools=TOOLS), [text]) == ("Let me see.", "Soon.", want)


def test_reasoning_may_speak_of_tags() -> None:
    answer = (
        f"<think>I write <function=get_weather> next.</think>\n{qwen('get_weather', city='Oslo')}"
    )
    want = ("I write <function=get_weather> next.", "", [OSLO])
    assert joined(parser_of(QWEN, tools=TOOLS), list(answer)) == want


@pytest.mark.parametrize(
    "text",
    [
        "Write <function=NAME> first.",
        "Write <function=unknown></function> first.",
        '[get_weather(city="Oslo", metric=open("x"))]',
        "<|tool_call_start|>[]<|tool_call_end|>",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    template = LFM2 if "start" in text else LLAMA_PYTHON if text[0] == "[" else QWEN
    assert joined(parser_of(template, tools=TOOLS), list(text)) == ("", text, [])


@pytest.mark.parametrize(
    ("template", "call"),
    [(LFM2, "<|tool_call_start|>[\0name("), (MISTRAL, "[TOOL_CALLS]\0name[ARGS]")],
)
def test_calls_that_must_be_made_are_written_so(template: str, call: str) -> None:
    form = find_form(template)
    assert form is not None and (form.calls.around[0] + form.calls.call[0]) == call
    assert json.dumps(form.calls.call), "plain text"
