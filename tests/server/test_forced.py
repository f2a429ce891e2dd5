"""What a forced answer may be, in every family's form: its call, and nothing that is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from clients import allows
from test_parsers import FAMILIES, HARMONY, LLAMA_4, LLAMA_4_LIST

from hotset.core.errors import RequestError
from hotset.core.request import TokenMatcher
from hotset.runtime.text import Text
from hotset.server.ask import Ask, Tool
from hotset.server.forced import make_matcher
from vocabulary import byte_ids

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"], "type": "string"},
    },
    "required": ["city"],
}
WEATHER = Tool(name="weather", parameters=SCHEMA)
NEWS = Tool(name="news", parameters={"type": "object", "properties": {}})
ASK = Ask(messages=[{"role": "user", "content": "hi"}], tools=(WEATHER, NEWS))
FORMS = {**FAMILIES, "llama 4": LLAMA_4, "llama 4 list": LLAMA_4_LIST}
FORMS["harmony"] = (
    HARMONY,
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo", "days": 3}',
)


def matcher_of(text: Text, ask: Ask, prompt: str = "") -> TokenMatcher:
    matcher = make_matcher(text, ask, byte_ids(prompt))
    assert matcher is not None
    return matcher


@pytest.fixture
def text_of(byte_text: Text, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The text side of a model with another template."""

    def make(template: str) -> Text:
        monkeypatch.setattr(Text, "chat_template", template)
        return byte_text

    return make


@pytest.mark.parametrize("family", FORMS)
def test_each_family_can_be_forced(text_of: Any, family: str) -> None:
    template, call = FORMS[family]
    text = text_of(template)
    ask = replace(ASK, tool_choice="required")
    assert allows(matcher_of(text, ask), call)
    for wrong in (
        call.replace("3", "many"),
        call.replace("city", "town"),
        call.replace("weather", "unknown"),
        f"It is. {call}",
        "",
    ):
        assert not allows(matcher_of(text, ask), wrong), wrong
    assert not allows(matcher_of(text, replace(ask, tool_choice="news")), call)


def test_choices_of_a_text_and_what_may_be_left_out(text_of: Any) -> None:
    text, ask = text_of(FAMILIES["minimax"][0]), replace(ASK, tool_choice="required")
    begin, end = '<minimax:tool_call>\n<invoke name="weather">\n', "</invoke>\n</minimax:tool_call>"
    city, days, unit = (
        f'<parameter name="{key}">{value}</parameter>\n'
        for key, value in (("city", "Ost</b>\nslo"), ("days", "3"), ("unit", "c"))
    )
    for said, is_allowed in (
        (city, True),
        (city + unit, True),
        (city + days + unit, True),
        (days, False),
        (city + unit + days, False),
        (city + unit.replace("c<", "k<"), False),
    ):
        assert allows(matcher_of(text, ask), begin + said + end) == is_allowed, said


@pytest.mark.parametrize(("family", "sep"), [("hermes", "\n"), ("qwen xml", "\n"), ("glm 4.7", "")])
def test_more_than_one_call(text_of: Any, family: str, sep: str) -> None:
    template, call = FAMILIES[family]
    text, two = text_of(template), f"{call}{sep}{call}"
    assert allows(matcher_of(text, replace(ASK, tool_choice="required")), two)
    assert not allows(matcher_of(text, replace(ASK, tool_choice="weather")), two)
    one = replace(ASK, tool_choice="required", parallel_calls=False)
    assert not allows(matcher_of(text, one), two)


def test_reasoning_comes_first(text_of: Any) -> None:
    """Whether the model opens it or the prompt has; its words are free."""
    template, call = FAMILIES["hermes"]
    text, ask = text_of(template), replace(ASK, tool_choice="required")
    thought = "Hm <tool_call> {\n</think>\n\n"
    assert allows(matcher_of(text, ask), f"<think>{thought}{call}")
    assert allows(matcher_of(text, ask, "<think>\n"), f"{thought}{call}")
    assert not allows(matcher_of(text, ask, "<think>\n"), call), "control: it is not over"
    assert not allows(matcher_of(text, ask), f"{thought}{call}"), "control: it is not open"
    harmony, said = FORMS["harmony"]
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert allows(matcher_of(text_of(harmony), ask), analysis + said)


def test_a_schema_beside_tools_and_reasoning(text_of: Any) -> None:
    template, call = FAMILIES["glm 4.7"]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text, ask = text_of(template), replace(ASK, schema=schema)
    for said, is_allowed in (('{"a": 1}', True), (call, True), ('{"a": "1"}', False)):
        assert allows(matcher_of(text, ask), said) == is_allowed
        assert allows(matcher_of(text, ask), f"<think>Hm</think>\n{said}") == is_allowed
    must, no = replace(ask, tool_choice="required"), replace(ask, tool_choice="none")
    assert not allows(matcher_of(text, must), '{"a": 1}') and allows(matcher_of(text, must), call)
    assert not allows(matcher_of(text, no), call) and allows(matcher_of(text, no), '{"a": 1}')
    final = '<|channel|>final<|message|>{"a": 1}'
    assert allows(matcher_of(text_of(HARMONY), replace(ask, tool_choice="none")), final)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"type": "object", "properties": {"a": {"minLength": 2}}},
            "cannot be held to `minLength`",
        ),
        ({"type": "object", "allOf": []}, "cannot be held to `allOf`"),
        ({"type": "object", "required": ["a"]}, "requires `a`, which has no schema"),
        # What is no schema at all.
        ({"type": "object", "required": 5}, "`required` is 5"),
        ({"type": "object", "required": [{}]}, "`required` is"),
        ({"type": 5}, "`type` is 5"),
        ({"properties": {"a": {"type": [{}]}}}, "`type` is"),
        ({"properties": {"a": {"enum": 5}}}, "`enum` is 5"),
        ({"properties": {"a": {"anyOf": None}}}, "`anyOf` is None"),
        ({"properties": {"a": {"oneOf": [{"anyOf": 5}]}}}, "`anyOf` is 5"),
        ({"properties": {"a": False}}, "the schema of `a` is False"),
        # Rules of which each leads to the next are followed on the thread's stack.
        ({"properties": {f"p{n}": {} for n in range(501)}}, "has 501 parameters"),
    ],
)
def test_what_cannot_be_held_to_is_refused(text_of: Any, schema: Any, words: str) -> None:
    text = text_of(FAMILIES["glm 4.7"][0])
    ask = replace(ASK, tools=(Tool(name="weather", parameters=schema),), tool_choice="required")
    with pytest.raises(RequestError, match=words):
        make_matcher(text, ask, byte_ids("hi"))
