"""Llama 4's calls, which no mark sets apart: an answer is calls from its first character, or none.

    {"name": "weather", "parameters": {"city": "Oslo"}}
    [weather(city="Oslo"), news()]

The first is what its template asks for, the second what Meta's own prompts do; both may stand
between `<|python_start|>` and `<|python_end|>`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from enum import Enum

from hotset.server.parsers.base import NO_CALLS, Call, Piece, Tools, make_call, new_call_id
from hotset.server.parsers.forms import KEY, NAME, AnswerForm, CallForm, ParameterForm
from hotset.server.parsers.growing import GrowingCalls
from hotset.server.parsers.json_calls import JSON_HEAD, read_json_calls

_OPEN, _CLOSE = "<|python_start|>", "<|python_end|>"
_JSON_START = '{"name"'
_LIST_START = re.compile(r"\[\s*[A-Za-z_][\w.-]*\(")
_LIST_SO_FAR = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]*)?")
_WORDS = {"true": True, "false": False, "null": None}

JSON_FORM = AnswerForm(CallForm((f'{{"name": "{NAME}", "parameters": ', "}"), between="; "))
PYTHON_FORM = AnswerForm(
    CallForm(
        (f"{NAME}(", ")"),
        around=("[", "]"),
        between=", ",
        parameters=ParameterForm(json=(f"{KEY}=", ""), between=", "),
    )
)


class _Is(Enum):
    OPEN = "not known yet"
    CONTENT = "content"
    JSON = "calls in JSON"
    LIST = "a list of calls"


class BareCallParser:
    """A `Speech` of one answer.

    Args:
        tools: of the request.
    """

    in_reasoning = False

    def __init__(self, *, tools: Tools) -> None:
        self._tools = tools
        self._growing = GrowingCalls(JSON_HEAD, tools)
        self._text = ""
        self._is = _Is.OPEN

    def feed(self, text: str) -> list[Piece]:
        """See `Speech`."""
        if self._is is _Is.CONTENT:
            return [Piece(content=text)]
        self._text += text
        if self._is is _Is.JSON:
            return self._growing.feed(text)
        if self._is is _Is.OPEN:
            self._is = _kind(self._text)
            if self._is is _Is.JSON:
                return self._growing.feed(_inner(self._text))
            if self._is is _Is.CONTENT:
                return [Piece(content=self._text)]
        return []

    def finish(self) -> list[Piece]:
        """See `Speech`."""
        if self._is is _Is.CONTENT or not self._text:
            return []
        num_begun = self._growing.num_begun
        calls = self._read()[num_begun:]
        if all(call.name in self._tools for call in calls) and (calls or num_begun):
            return [
                Piece(call_id=new_call_id(), name=call.name, arguments=call.arguments)
                for call in calls
            ]
        return [Piece(content=self._growing.rest if num_begun else self._text)]

    def _read(self) -> Sequence[Call]:
        body = _inner(self._text).removesuffix(_CLOSE).strip()
        try:
            if self._is is _Is.LIST:
                return read_python_calls(body)
            return read_json_calls(body, self._tools) if self._is is _Is.JSON else ()
        except NO_CALLS:
            return ()


def _inner(text: str) -> str:
    return text.lstrip().removeprefix(_OPEN)


def _kind(text: str) -> _Is:
    """What an answer that begins so is; `OPEN` while more text may decide."""
    text = text.lstrip()
    if _OPEN.startswith(text):
        return _Is.OPEN
    text = text.removeprefix(_OPEN).lstrip()
    bare = re.sub(r"\s", "", text[: 4 * len(_JSON_START)])
    if bare.startswith(_JSON_START):
        return _Is.JSON
    if _LIST_START.match(text):
        return _Is.LIST
    may_become = _JSON_START.startswith(bare) or _LIST_SO_FAR.fullmatch(text)
    return _Is.OPEN if may_become else _Is.CONTENT


def read_python_calls(body: str) -> list[Call]:
    """Calls in a list of Python's.

    Raises:
        ValueError, SyntaxError: it is none, or has anything but keywords and plain values.
    """
    tree = ast.parse(body, mode="eval").body
    if not isinstance(tree, ast.List):
        raise ValueError("not a list")
    calls = []
    for node in tree.elts:
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("not a call")
        arguments = {entry.arg: _value(entry.value) for entry in node.keywords}
        calls.append(make_call(ast.unparse(node.func), arguments))
    return calls


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List):
        return [_value(entry) for entry in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys are texts")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value: object = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise ValueError("not a value of JSON")
    return value
