"""Calls with JSON arguments, put out while they are written.

Knows where a JSON object ends, and the text that a syntax writes before it. What was put out stays:
arguments that turn out to be no JSON, or that are cut off, reach the client as they are.
"""

from __future__ import annotations

import re

from hotset.server.parsers.base import Piece, Tools, new_call_id

# Looked at, and left to be read: an object of which something has come that JSON may have there.
OBJECT = r'(?=\{\s*["}])'

# What begins a call has a name in it and hardly more; a longer text is read when it is whole.
_HEAD_CHARS = 512


class _Extent:
    """Finds the end of a JSON object whose text comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_over = False

    def take(self, text: str) -> int:
        """How many of these characters belong to it."""
        for place, char in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_over = True
                    return place + 1
        return len(text)


class GrowingCalls:
    """The calls of one stretch of text.

    Args:
        head: what stands before the arguments of a call, up to `OBJECT`; the group `name` is the
            tool, `id`, where there is such a group, the model's own id.
        tools: of the request; a call of any other ends this, and the text is left to be read whole.

    Attributes:
        num_begun: calls that have been put out, whole or in part.
        rest: text behind what was put out.
    """

    def __init__(self, head: re.Pattern[str], tools: Tools) -> None:
        self._head, self._tools = head, tools
        self._object: _Extent | None = None
        self._call_id = ""
        self.num_begun = 0
        self.rest = ""

    def feed(self, text: str) -> list[Piece]:
        """Pieces that this text completes."""
        self.rest += text
        pieces: list[Piece] = []
        while self.rest:
            if self._object is None and not self._begin(pieces):
                break
            assert self._object is not None
            size = self._object.take(self.rest)
            pieces.append(Piece(call_id=self._call_id, arguments=self.rest[:size]))
            self.rest = self.rest[size:]
            if self._object.is_over:
                self._object = None
        return pieces

    def _begin(self, pieces: list[Piece]) -> bool:
        match = self._head.match(self.rest, 0, _HEAD_CHARS)
        if match is None or match["name"] not in self._tools:
            return False
        self._call_id = match.groupdict().get("id") or new_call_id()
        pieces.append(Piece(call_id=self._call_id, name=match["name"]))
        self.rest = self.rest[match.end() :]
        self._object, self.num_begun = _Extent(), self.num_begun + 1
        return True
