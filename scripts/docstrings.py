"""Turns a docstring of this project's style into Markdown: text, code, `Args:` and its like.

Knows indentation and section heads; knows nothing of what is documented.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

_SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:")
_ITEM = re.compile(r"(?P<names>\w+(?:, \w+)*): (?P<text>.+)")


def to_markdown(item: Any) -> str:
    """The docstring of a module, class or function as Markdown."""
    return "\n".join(_blocks(inspect.getdoc(item) or "")).strip() + "\n"


def _blocks(doc: str) -> Iterator[str]:
    """Paragraphs as they are, indented text as code, sections as lists."""
    lines = doc.splitlines()
    index = 0
    while index < len(lines):
        line = lines[index]
        end = index + 1
        if line in _SECTIONS:
            while end < len(lines) and (not lines[end] or lines[end].startswith(" ")):
                end += 1
            yield f"**{line.rstrip(':')}**\n"
            yield from _items([part[4:] for part in lines[index + 1 : end]])
        elif line.startswith("    "):
            while end < len(lines) and (not lines[end] or lines[end].startswith("    ")):
                end += 1
            code = "\n".join(part[4:] for part in lines[index:end]).rstrip()
            yield f"```{_language(code)}\n{code}\n```\n"
        else:
            yield line
        index = end


def _items(lines: list[str]) -> Iterator[str]:
    """A list item for each `name: text`, its indented continuation joined; other text as it is."""
    joined: list[str] = []
    for line in lines:
        if line.startswith(" ") and joined:
            joined[-1] += f" {line.strip()}"
        elif line:
            joined.append(line)
    for text in joined:
        match = _ITEM.fullmatch(text)
        if match is None:
            yield text
            continue
        names = ", ".join(f"`{name}`" for name in match["names"].split(", "))
        yield f"- {names}: {match['text']}"
    yield ""


def _language(code: str) -> str:
    try:
        ast.parse(code)
    except SyntaxError:
        return "text"
    return "python"
