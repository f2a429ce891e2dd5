"""Calls that must be made, as Lark: from a family's form and the schemas of the tools.

Arguments in JSON are held to their schema by the grammar library. Where each stands by itself, in
the order of the schema, its value is JSON again or a text without quotes, and what a schema asks of
such a text beyond a choice of values is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hotset.core.errors import RequestError
from hotset.runtime.grammar import GrammarCompiler
from hotset.server.ask import Tool
from hotset.server.parsers.base import kinds, may_be_text
from hotset.server.parsers.forms import KEY, LINE, NAME, NUMBER, CallForm, ParameterForm

_PLACES = re.compile(f"({NUMBER}|{LINE})")
_LINE_SOURCE = '"\\n"?'
_DEFINITIONS = ("$defs", "definitions")
_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"}
)
# What a schema may say of arguments that stand one by one, and of a text without quotes.
_OF_OBJECTS = _NOTES | {
    *("type", "properties", "required", "additionalProperties", "strict"),
    *_DEFINITIONS,
}
_OF_TEXTS = _NOTES | {"type", "anyOf", "oneOf", "enum", "const"}
# Each is a rule that leads to the next, and the library follows them by recursion: 2,000 were well.
_MAX_PARAMETERS = 500
# Words of a schema that have lists, and what is in them.
_LISTS: Mapping[str, type | tuple[type, ...]] = {
    **{"type": str, "required": str, "enum": object},
    **dict.fromkeys(("anyOf", "oneOf"), (Mapping, bool)),
}


class CallGrammar:
    """Rules of calls, the first of them `calls`.

    Args:
        grammars: of the checkpoint.
        form: of its calls.
    """

    def __init__(self, grammars: GrammarCompiler, form: CallForm) -> None:
        self._grammars, self._form = grammars, form
        self._rules: list[str] = []

    def rules(self, tools: Sequence[Tool], *, many: bool) -> list[str]:
        """Lark of one call, or of one and more.

        Raises:
            RequestError: a schema that cannot be held to.
        """
        form, names = self._form, " | ".join(f"tool_{number}" for number in range(len(tools)))
        begin, end = (self._spell(text) for text in form.around)
        more = "" if not many or form.between is None else f"({self._spell(form.between)} call)*"
        self._rules = [f"calls: {begin} call {more} {end}", f"call: {names}"]
        for number, tool in enumerate(tools):
            before, behind = (self._spell(text, name=tool.name) for text in form.call)
            rule = f"tool_{number}"
            arguments = self._arguments(tool, rule)
            self._rules.append(f"{rule}: {before} {arguments} {behind}")
        return self._rules

    def _spell(self, text: str, *, name: str = "", key: str = "") -> str:
        parts = []
        for piece in _PLACES.split(text.replace(NAME, name).replace(KEY, key)):
            if piece:
                places = {NUMBER: "/[0-9]+/", LINE: _LINE_SOURCE}
                parts.append(places.get(piece) or self._grammars.literal(piece))
        return " ".join(parts) or '""'

    def _arguments(self, tool: Tool, rule: str) -> str:
        form = self._form.parameters
        if form is None:
            return self._grammars.json_rule(tool.parameters)
        known, required = _checked(tool)
        items = []
        for number, (key, schema) in enumerate(known.items()):
            item = f"{rule}_{number}"
            value = self._value(tool, key, schema, form, item)
            self._rules.append(f"{item}: {value} {self._spell(form.after)}")
            items.append((item, key in required))
        return self._sequence(rule, items, form)

    def _sequence(self, rule: str, items: Sequence[tuple[str, bool]], form: ParameterForm) -> str:
        """Items in order, those that are not required or left out; a rule for each place, for
        something stands before it or nothing does."""
        between = self._spell(form.between)
        for number, (item, required) in enumerate(items):
            first, later = f"{rule}_first_{number}", f"{rule}_later_{number}"
            skip_first = "" if required else f" | {rule}_first_{number + 1}"
            skip_later = "" if required else f" | {rule}_later_{number + 1}"
            self._rules.append(f"{first}: {item} {rule}_later_{number + 1}{skip_first}")
            self._rules.append(f"{later}: {between} {item} {rule}_later_{number + 1}{skip_later}")
        self._rules += [f'{rule}_{word}_{len(items)}: ""' for word in ("first", "later")]
        return f"{rule}_first_0"

    def _value(
        self, tool: Tool, key: str, schema: Mapping[str, Any], form: ParameterForm, item: str
    ) -> str:
        if form.text is None or not may_be_text(schema):
            before, behind = (self._spell(text, key=key) for text in form.json)
            shared = {
                name: tool.parameters[name] for name in _DEFINITIONS if name in tool.parameters
            }
            return f"{before} {self._grammars.json_rule({**shared, **schema})} {behind}"
        before, behind = self._spell(form.text[0], key=key), form.text[1]
        _check(tool, schema, _OF_TEXTS, f"`{key}`, which stands without quotes")
        chosen = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if chosen is None:
            self._rules.append(self._grammars.text_until(f"{item}_text", behind))
            return f"{before} {item}_text"
        if not all(isinstance(text, str) for text in chosen):
            raise _refused(tool, f"`{key}` has values that are no texts")
        texts = " | ".join(self._grammars.literal(text) for text in chosen)
        layout = _LINE_SOURCE if behind.startswith("</parameter") else ""
        return f"{before} ({texts}) {layout} {self._grammars.literal(behind)}"


def _checked(tool: Tool) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Schemas of the parameters, and which of them are required."""
    schema = tool.parameters
    _check(tool, schema, _OF_OBJECTS, "arguments that stand one by one")
    _check_words(tool, schema)
    properties, required = schema.get("properties", {}), frozenset(schema.get("required", ()))
    if kinds(schema) - {"object"} or not isinstance(properties, Mapping):
        raise _refused(tool, "its arguments are no object")
    if missing := sorted(required - properties.keys()):
        raise _refused(tool, f"it requires `{missing[0]}`, which has no schema")
    if len(properties) > _MAX_PARAMETERS:
        raise _refused(tool, f"it has {len(properties)} parameters, the most is {_MAX_PARAMETERS}")
    plain: dict[str, Mapping[str, Any]] = {}
    for key, value in properties.items():
        plain[key] = {} if value is True else value
        if not isinstance(plain[key], Mapping):
            raise _refused(tool, f"the schema of `{key}` is {value!r}")
        _check_words(tool, plain[key])
    return plain, required


def _check_words(tool: Tool, schema: Mapping[str, Any]) -> None:
    """Refuses words with a value that they cannot have, in alternatives too."""
    for word, kind in _LISTS.items():
        given = schema.get(word, [])
        given = [given] if word == "type" and isinstance(given, str) else given
        if not isinstance(given, list) or not all(isinstance(entry, kind) for entry in given):
            raise _refused(tool, f"`{word}` is {given!r}, which is no value for it")
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        if isinstance(branch, Mapping):
            _check_words(tool, branch)


def _check(tool: Tool, schema: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    if unknown := sorted(schema.keys() - known):
        raise _refused(tool, f"{what} cannot be held to `{unknown[0]}`")


def _refused(tool: Tool, reason: str) -> RequestError:
    return RequestError(
        f"calls of `{tool.name}` cannot be forced: {reason}",
        hint="simplify the schema, or leave `tool_choice` at `auto`",
        option="tools",
    )
