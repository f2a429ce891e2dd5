"""Values as Python writes them, to what JSON can hold: models and templates mix the two.

Reads literals only; nothing is run. Knows no tools and no syntax around them.
"""

from __future__ import annotations

import ast
import re

_WORDS = {"true": True, "false": False, "null": None}
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def value_of(node: ast.expr) -> object:
    """The value of a literal; JSON's words are taken for Python's.

    Raises:
        ValueError: it is none, or nothing that JSON can hold.
    """
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List):
        return [value_of(entry) for entry in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys are texts")
        return dict(zip(keys, map(value_of, node.values), strict=True))
    value: object = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise ValueError("not a value of JSON")
    return value


def parse(source: str) -> ast.expr:
    """An expression. Lines may break within a text in quotes, which Python itself refuses: models
    write commands of several lines so.

    Raises:
        ValueError, SyntaxError, RecursionError, MemoryError: it is none.
    """
    source = source.strip()
    try:
        return ast.parse(source, mode="eval").body
    except SyntaxError:
        one_line = _TEXT.sub(lambda text: _escaped(text[0]), source)
        return ast.parse(one_line, mode="eval").body


def _escaped(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")
