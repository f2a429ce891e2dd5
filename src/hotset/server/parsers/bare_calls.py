"""Calls in a list of Python's, and Llama 4's, which no mark sets apart.

    {"name": "weather", "parameters": {"city": "Oslo"}}
    [weather(city="Oslo"), news()]

Llama 4 answers with calls from the first character, or with none. The first form is what its
template asks for, the second what Meta's own prompts do; both may stand between
`<|python_start|>` and `<|python_end|>`. LFM2 writes the second between marks of its own.
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
from hotset.server.parsers.marked import Syntax
from hotset.server.parsers.python_values import parse, value_of

_OPEN, _CLOSE = "<|python_start|>", "<|python_end|>"
# Llama 3 wrote the second, and so do models that learned from it.
_JSON_STARTS = ('{"name"', '{"type":"function"')
_LIST_START = re.compile(r"\[\s*[A-Za-z_][\w.-]*\(")
_LIST_SO_FAR = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]*)?")

JSON_FORM = AnswerForm(CallForm((f'{{"name": "{NAME}", "parameters": ', "}"), between="; "))


def _python_form(begin: str, end: str) -> CallForm:
    return CallForm(
        (f"{NAME}(", ")"),
        around=(begin, end),
        between=", ",
        parameters=ParameterForm(json=(f"{KEY}=", ""), between=", "),
    )


PYTHON_FORM = AnswerForm(_python_form("[", "]"))


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
                return read_python_calls(body, self._tools)
            return read_json_calls(body, self._tools) if self._is is _Is.JSON else ()
        except NO_CALLS:
            return ()


def _inner(text: str) -> str:
    """Without what stands before calls: a mark, or a pair of them with nothing between."""
    inner = text.lstrip().removeprefix(_OPEN).lstrip()
    return inner.removeprefix(_CLOSE)


def _kind(text: str) -> _Is:
    """What an answer that begins so is; `OPEN` while more text may decide."""
    text = text.lstrip()
    if _OPEN.startswith(text):
        return _Is.OPEN
    if text.startswith(_OPEN) and _CLOSE.startswith(text.removeprefix(_OPEN).lstrip()):
        return _Is.OPEN
    text = _inner(text).lstrip()
    bare = re.sub(r"\s", "", text[: 4 * len(_JSON_STARTS[1])])
    if bare.startswith(_JSON_STARTS):
        return _Is.JSON
    if _LIST_START.match(text):
        return _Is.LIST
    may_become = any(start.startswith(bare) for start in _JSON_STARTS)
    return _Is.OPEN if may_become or _LIST_SO_FAR.fullmatch(text) else _Is.CONTENT


def read_python_calls(body: str, tools: Tools) -> list[Call]:
    """See `ReadCalls`. Keywords and plain values only."""
    tree = parse(body)
    if not isinstance(tree, ast.List):
        raise ValueError("not a list")
    calls = []
    for node in tree.elts:
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("not a call")
        arguments = {entry.arg: value_of(entry.value) for entry in node.keywords}
        calls.append(make_call(ast.unparse(node.func), arguments))
    return calls


LFM2 = Syntax(
    read_python_calls,
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    _python_form("<|tool_call_start|>[", "]<|tool_call_end|>"),
)
