"""The interface of parsers, and what syntaxes share: typed values, checked calls.

Knows text and the tools of a request; nothing of tokens, sockets or wire formats.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hotset.server.parsers.python_values import parse, value_of

# Tool name -> JSON schema of its parameters.
Tools = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Piece:
    """A piece of one kind.

    Attributes:
        content, reasoning: text.
        call_id: of the call that the piece belongs to.
        name: of its tool, on its first piece only.
        arguments: JSON text.
    """

    content: str = ""
    reasoning: str = ""
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


class Speech(Protocol):
    """Sorts text into pieces as it comes; however the text is cut, the pieces join to the same."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""

    def feed(self, text: str) -> list[Piece]:
        """Pieces that this text completes."""

    def finish(self) -> list[Piece]:
        """What was held back, at the end."""


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it.

    Attributes:
        name: of the tool.
        arguments: JSON text of an object.
        call_id: the model's own, where its syntax has one.
    """

    name: str
    arguments: str
    call_id: str | None = None


def new_call_id() -> str:
    """For a call of a syntax that names none."""
    return f"call_{secrets.token_hex(12)}"


# Text between the marks of a call, and the tools -> its calls; `NO_CALLS` where there are none.
ReadCalls = Callable[[str, Tools], list[Call]]
# What readers raise of a text that a model made up, however odd: also Python's parser and JSON's,
# of brackets by the thousand.
NO_CALLS = (
    *(ValueError, TypeError, KeyError, AttributeError, SyntaxError),
    *(RecursionError, MemoryError),
)


def make_call(name: str, arguments: object, call_id: str | None = None) -> Call:
    """A call of arguments as objects.

    Raises:
        ValueError: no name, or the arguments are no object that JSON can hold.
    """
    if isinstance(arguments, str):  # some models write the object as text once more
        arguments = json.loads(arguments or "{}")
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        raise ValueError("not a call")
    return Call(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False), call_id)


def kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that a schema names, itself or in its alternatives; empty where it names none.

    A schema is what a client wrote: what is none names none.
    """
    found = {kind for kind in _listed(schema.get("type")) if isinstance(kind, str)}
    for word in ("anyOf", "oneOf"):
        for branch in _listed(schema.get(word)):
            found |= kinds(branch) if isinstance(branch, Mapping) else set()
    return frozenset(found)


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else (value,)


def may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value without quotes is text: where the schema wants text, or says nothing."""
    if "string" in kinds(schema):
        return True
    return not kinds(schema) and "$ref" not in schema and "allOf" not in schema


def typed(value: str, schema: Mapping[str, Any] | None) -> object:
    """A value that was written without quotes, as its parameter's schema wants it.

    Text where the schema wants text or says nothing; otherwise JSON, or a literal of Python's (the
    templates of Qwen3-Coder and Step print `True` in earlier calls, and models follow), or text
    where it is neither.
    """
    schema = schema or {}
    if may_be_text(schema):
        return None if value == "null" and "null" in kinds(schema) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return value_of(parse(value))
    except NO_CALLS:
        return value


def parameter(tools: Tools, tool: str, name: str) -> Mapping[str, Any] | None:
    """Schema of a parameter, where it has one."""
    properties = tools.get(tool, {}).get("properties", {})
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else None


def num_held(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of a text that one of the marks begins with: more text may make it
    that mark."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
