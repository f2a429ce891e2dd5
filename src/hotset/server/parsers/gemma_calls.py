"""Gemma 4's calls: an object whose texts stand between marks of their own, keys without quotes.

    <|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>

Its reasoning is a channel: `<|channel>thought`, a line break, text, `<channel|>`. Behind its calls
it may hand over with `<|tool_response>`, where a client's tool has to answer.
"""

from __future__ import annotations

import json
import re

from hotset.server.parsers.base import Call, Tools, make_call
from hotset.server.parsers.forms import KEY, NAME, CallForm, ParameterForm
from hotset.server.parsers.marked import Syntax

_QUOTE = '<|"|>'
_CALL = re.compile(r"\s*call:\s*([^{\s]+)\s*(\{.*\})\s*", re.DOTALL)
_KEY = re.compile(r"\s*([^\s:,{}\[\]]+)\s*:")
# Numbers, words, and texts whose marks the model left out, up to what may follow one.
_BARE = re.compile(r"[^,\]}]+")
_WORDS = {"None": None, "True": True, "False": False}


def read_gemma_calls(body: str, tools: Tools) -> list[Call]:
    """See `ReadCalls`."""
    match = _CALL.fullmatch(body)
    if match is None:
        raise ValueError("not a call")
    value, end = _read(match[2], 0)
    if match[2][end:].strip():
        raise ValueError("something behind the arguments")
    return [make_call(match[1], value)]


def _read(text: str, at: int) -> tuple[object, int]:
    """The value at a place, and the place behind it.

    Raises:
        ValueError: there is none.
    """
    at = _skip(text, at)
    if text.startswith("{", at):
        return _read_object(text, at + 1)
    if text.startswith("[", at):
        return _read_array(text, at + 1)
    if text.startswith((_QUOTE, '"'), at):
        return _read_text(text, at)
    match = _BARE.match(text, at)
    if match is None:
        raise ValueError("a value is missing")
    return _bare(match[0].strip()), match.end()


def _bare(word: str) -> object:
    if word in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(word)
    except ValueError:
        if any(mark in word for mark in '{[":<'):
            raise  # half of something else
        return word


def _read_text(text: str, at: int) -> tuple[str, int]:
    if text.startswith(_QUOTE, at):
        begin = at + len(_QUOTE)
        end = text.index(_QUOTE, begin)
        return text[begin:end], end + len(_QUOTE)
    value, end = json.JSONDecoder().raw_decode(text, at)
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value, end


def _read_object(text: str, at: int) -> tuple[dict[str, object], int]:
    made: dict[str, object] = {}
    while not text.startswith("}", at := _skip(text, at)):
        if text.startswith((_QUOTE, '"'), at):
            key, at = _read_text(text, at)
            at = _skip(text, at)
            if not text.startswith(":", at):
                raise ValueError("a key without a value")
            at += 1
        elif (match := _KEY.match(text, at)) is not None:
            key, at = match[1], match.end()
        else:
            raise ValueError("a key is missing")
        made[key], at = _read(text, at)
        at = _next(text, at, "}")
    return made, at + 1


def _read_array(text: str, at: int) -> tuple[list[object], int]:
    made: list[object] = []
    while not text.startswith("]", at := _skip(text, at)):
        value, at = _read(text, at)
        made.append(value)
        at = _next(text, at, "]")
    return made, at + 1


def _next(text: str, at: int, close: str) -> int:
    """Behind the comma, or at what closes."""
    at = _skip(text, at)
    if text.startswith(",", at):
        return at + 1
    if not text.startswith(close, at):
        raise ValueError(f"neither a comma nor {close}")
    return at


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


GEMMA = Syntax(
    read_gemma_calls,
    "<|tool_call>",
    "<tool_call|>",
    CallForm(
        (f"<|tool_call>call:{NAME}{{", "}<tool_call|>"),
        parameters=ParameterForm(
            json=(f"{KEY}:", ""), text=(f"{KEY}:{_QUOTE}", _QUOTE), between=","
        ),
    ),
    think_open="<|channel>thought",
    think_close="<channel|>",
    dropped=("<|tool_response>",),
)
