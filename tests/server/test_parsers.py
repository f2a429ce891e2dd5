"""Parsers of answers: each family's own form, however it is cut, and what is malformed is text."""
# ruff: noqa: RUF001 - DeepSeek's marks have wide bars

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.server.parsers.base import Piece, Speech
from hotset.server.parsers.registry import find_syntax, make_parser

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    }
}
WANT = ("weather", {"city": "Oslo", "days": 3})
CALL = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'
ARGUMENTS = '{"city": "Oslo", "days": 3}'
# Template -> one call as that family writes it.
FAMILIES = {
    "hermes": ("<think> <tool_call>", f"<tool_call>\n{CALL}\n</tool_call>"),
    "qwen xml": (
        "<think> <tool_call> <function=",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm 4.5": (
        "<think> <tool_call> <arg_key>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    ),
    "glm 4.7": (
        "<think> <tool_call> <arg_key>",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    ),
    "minimax": (
        "<think> <minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "deepseek v3": (
        "<｜tool▁call▁begin｜> ```json",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek v3.1": (
        "<｜tool▁call▁begin｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek v3.2": (
        "<｜DSML｜function_calls>",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "kimi": (
        "<|tool_call_begin|><|tool_call_argument_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "granite 3": ("<|tool_call|>", f"<|tool_call|>[{CALL}]"),
    "hunyuan": ("<tool_calls>", f"<tool_calls>[{CALL}]</tool_calls>"),
    "mistral": ("[TOOL_CALLS]", f"[TOOL_CALLS] [{CALL}]"),
    "mistral v11": ("[TOOL_CALLS] [ARGS]", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
    "lfm2": (
        "<think> <|tool_call_start|>",
        '<|tool_call_start|>[weather(city="Oslo", days=3)]<|tool_call_end|>',
    ),
    "ernie": ("<think> <tool_call> <response>", f"<tool_call>\n{CALL}\n</tool_call>"),
    "gemma 4": (
        "<|tool_call>",
        '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>',
    ),
}
# Calls that no mark sets apart: an answer is one from its first character, or none.
LLAMA_4 = ('<|header_start|> "parameters"', CALL.replace("arguments", "parameters"))
LLAMA_4_LIST = ("<|header_start|>", '[weather(city="Oslo", days=3)]')
HARMONY = "<|channel|><|message|>"
HARMONY_ANSWER = (
    "<|channel|>analysis<|message|>Need a tool.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)


def parser_of(template: str, *, prompt: str = "", tools: Any = None) -> Speech:
    parser = make_parser(template, tools=TOOLS if tools is None else tools, prompt=prompt)
    assert parser is not None
    return parser


def joined(parser: Speech, chunks: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    """(reasoning, content, calls) of all pieces."""
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish()
    calls: dict[str, tuple[str, str]] = {}
    for p in pieces:
        if p.call_id is not None:
            name, arguments = calls.get(p.call_id, ("", ""))
            calls[p.call_id] = name + (p.name or ""), arguments + p.arguments
    made = [(name, _loaded(text)) for name, text in calls.values()]
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces), made


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # cut off, or nested too deep
        return text


def whole(template: str, text: str, **kwargs: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    return joined(parser_of(template, **kwargs), [text])


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_calls(family: str) -> None:
    template, call = FAMILIES[family]
    assert whole(template, call) == ("", "", [WANT])
    assert whole(template, f"I will look.\n\n{call}") == ("", "I will look.", [WANT])
    assert whole(template, call, tools={}) == ("", call, []), "control: no tools, no calls"


@pytest.mark.parametrize("family", [name for name, (t, _) in FAMILIES.items() if "<think>" in t])
def test_reasoning_is_told_apart(family: str) -> None:
    template, call = FAMILIES[family]
    answer = f"Let me see.\n</think>\n\nSoon.\n{call}"
    want = ("Let me see.", "Soon.", [WANT])
    assert whole(template, f"<think>\n{answer}") == want
    assert whole(template, answer, prompt="<assistant><think>\n") == want
    # Qwen3.5 and Kimi may call without an end of the reasoning.
    assert whole(template, f"<think>Now{call}") == ("Now", "", [WANT])


def test_two_calls_have_two_ids() -> None:
    template, call = FAMILIES["hermes"]
    pieces = parser_of(template).feed(f"{call}\n{call}")
    assert [piece.name for piece in pieces if piece.name] == ["weather"] * 2
    assert len({piece.call_id for piece in pieces}) == 2


GROWING = [
    "hermes",
    "deepseek v3",
    "deepseek v3.1",
    "kimi",
    "granite 3",
    "hunyuan",
    "mistral",
    "mistral v11",
]


@pytest.mark.parametrize("family", [*GROWING, "llama 4", "harmony"])
def test_arguments_come_as_they_are_written(family: str) -> None:
    """Each character of them as soon as it is there; whole calls are the control."""
    harmony = HARMONY, HARMONY_ANSWER
    template, call = {**FAMILIES, "llama 4": LLAMA_4, "harmony": harmony}[family]
    half = call.index('"Os') + 3
    pieces = parser_of(template).feed(call[:half])
    assert [p.name for p in pieces if p.call_id] == ["weather", None]
    assert pieces[-1].arguments == '{"city": "Os'
    assert [p for p in parser_of(FAMILIES["glm 4.7"][0]).feed(FAMILIES["glm 4.7"][1][:60])] == []


def test_a_call_that_is_cut_off_keeps_what_it_has() -> None:
    parser = parser_of(FAMILIES["hermes"][0])
    pieces = parser.feed(FAMILIES["hermes"][1][:50]) + parser.finish()
    assert "".join(piece.arguments for piece in pieces) and not any(p.content for p in pieces)


def test_braces_and_quotes_within_texts_end_nothing() -> None:
    text = json.dumps({"city": 'a}]"\\', "days": 3})
    call = f'<tool_call>{{"name": "weather", "arguments": {text}}}</tool_call>'
    assert whole(FAMILIES["hermes"][0], call)[2] == [("weather", json.loads(text))]


def test_several_calls_in_one_list() -> None:
    for family in ("hunyuan", "granite 3", "mistral"):
        template, call = FAMILIES[family]
        assert whole(template, call.replace(CALL, f"{CALL}, {CALL}")) == ("", "", [WANT, WANT])
        odd = call.replace(CALL, f'{CALL}, {{"arguments": {{}}, "name": "weather"}}')
        assert whole(template, odd)[2] == [WANT, ("weather", {})], "the second is read when whole"


@pytest.mark.parametrize(("template", "call"), [LLAMA_4, LLAMA_4_LIST])
def test_calls_without_marks(template: str, call: str) -> None:
    for text in (call, f"<|python_start|>{call}<|python_end|>", f"\n{call}"):
        assert whole(template, text) == ("", "", [WANT])
    assert whole(template, f"See {call}") == ("", f"See {call}", []), "control: text comes first"
    for text in ("[1] is", '{"a": 1}', "[see](x)", call.replace("weather", "unknown"), "[x("):
        assert whole(template, text) == ("", text, [])
    assert make_parser(template, tools={}) is None
    two = call[:-1] + ", " + call[1:] if call[0] == "[" else f"{call}; {call}"
    assert whole(template, two)[2] == [WANT, WANT]


def test_gemmas_values() -> None:
    template, _ = FAMILIES["gemma 4"]
    text = (
        '<|tool_call>call:weather{city:<|"|>a,}"b<|"|>,days:-1.5,more:{on:true,"x y":[null,1]},'
        "no:[]}<tool_call|>"
    )
    want = {"city": 'a,}"b', "days": -1.5, "more": {"on": True, "x y": [None, 1]}, "no": []}
    assert whole(template, text)[2] == [("weather", want)]
    assert whole(template, f"<|channel>thought\nHm.\n<channel|>Yes.{text}")[:2] == ("Hm.", "Yes.")
    broken = text.replace("no:", "no")
    assert whole(template, broken) == ("", broken, [])


@pytest.mark.parametrize(("family", "word"), [("ernie", "response"), ("hunyuan", "answer")])
def test_marks_around_the_content_are_no_content(family: str, word: str) -> None:
    template, call = FAMILIES[family]
    text = f"<think>\nHm.\n</think>\n<{word}>\nYes.\n</{word}>\n"
    assert whole(template, text) == ("Hm.", "Yes.", [])
    assert whole(template, text + call, tools=TOOLS)[2] == [WANT]


def test_what_a_schema_allows_is_no_mark() -> None:
    text = '{"say": "<think> and <tool_call>"}'
    for verbatim, want in ((True, ("Hm.", text)), (False, None)):
        parser = make_parser("<think> <tool_call>", tools=TOOLS, verbatim=verbatim)
        assert parser is not None
        got = joined(parser, [f"<think>Hm.</think>\n{text}"])[:2]
        assert (got == want) == verbatim


def test_kimis_ids_are_kept() -> None:
    piece, *_ = parser_of(FAMILIES["kimi"][0]).feed(FAMILIES["kimi"][1])
    assert piece.call_id == "functions.weather:0"


def test_harmony() -> None:
    assert whole(HARMONY, HARMONY_ANSWER) == ("Need a tool.", "", [WANT])
    stopped = HARMONY_ANSWER.removesuffix("<|call|>")
    assert whole(HARMONY, stopped) == ("Need a tool.", "", [WANT]), "the stop id is no text"
    final = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi!"
    )
    assert whole(HARMONY, final) == ("Hm.", "Hi!", [])
    broken = "<|channel|>commentary to=functions.weather<|message|>{oops<|call|>"
    assert whole(HARMONY, broken) == ("", "{oops", [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "weather"',
        "a < b and <tool_cal",
    ],
)
def test_what_is_malformed_is_text(text: str) -> None:
    assert whole(FAMILIES["hermes"][0], text) == ("", text, [])


@pytest.mark.parametrize("family", [*FAMILIES, "llama 4", "llama 4 list", "harmony"])
@pytest.mark.parametrize("days", ["[" * 20_000, '{"a":' * 20_000, "-" * 30_000 + "1", "1e999"])
def test_what_no_json_holds_ends_no_answer(family: str, days: str) -> None:
    """Python's parsers raise errors of their own for it."""
    others = {
        "llama 4": LLAMA_4,
        "llama 4 list": LLAMA_4_LIST,
        "harmony": (HARMONY, HARMONY_ANSWER),
    }
    template, call = {**FAMILIES, **others}[family]
    _, content, calls = whole(template, call.replace("3", days))
    assert content or [name for name, _ in calls] == ["weather"]


def test_gemma_hands_over_behind_its_calls() -> None:
    template, call = FAMILIES["gemma 4"]
    answer = f"<|channel>thought\nHm.\n<channel|>{call}{call}<|tool_response>"
    assert whole(template, answer) == ("Hm.", "", [WANT, WANT])


def test_values_have_the_types_of_the_schema() -> None:
    tools = {"f": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "l": {}}}}
    text = (
        "<tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value><arg_key>s</arg_key>"
        "<arg_value>3</arg_value><arg_key>l</arg_key><arg_value>[1</arg_value></tool_call>"
    )
    assert whole(FAMILIES["glm 4.5"][0], text, tools=tools)[2] == [
        ("f", {"n": 3, "s": "3", "l": "[1"})
    ]


def test_a_template_without_marks_has_no_parser() -> None:
    assert (
        make_parser("{{ messages }}", tools=TOOLS) is None and make_parser(None, tools={}) is None
    )
    assert find_syntax("<think>") is not None


FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "word", "<", "<tool", "[1]"),
    *("<|channel|>", "<|message|>", "<|end|>", "analysis", "final", "to=functions.weather", "<|"),
    *(call for _, call in FAMILIES.values()),
    *(HARMONY_ANSWER, LLAMA_4[1], LLAMA_4_LIST[1], CALL[:45], "<|channel>thought", "<response>"),
]
TEMPLATES = [*(template for template, _ in FAMILIES.values()), HARMONY, LLAMA_4[0]]


@settings(max_examples=200, deadline=None)
@given(
    template=st.sampled_from(TEMPLATES),
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=6),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_any_cut_gives_the_same(template: str, parts: list[str], cuts: list[int]) -> None:
    """SV-15: streamed is what buffered is."""
    text, chunks, start = "".join(parts), [], 0
    while start < len(text):
        size = cuts[len(chunks) % len(cuts)]
        chunks.append(text[start : start + size])
        start += size
    assert joined(parser_of(template), chunks) == whole(template, text)


def test_plain_text_is_not_held_back() -> None:
    parser = parser_of(FAMILIES["hermes"][0])
    assert parser.feed("Hello") == [Piece(content="Hello")]
    assert parser.feed(" you <") == [Piece(content=" you")]
    assert parser.feed("b") == [Piece(content=" <b")]
