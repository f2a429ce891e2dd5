"""What a model says, from ids to text to pieces: stop strings first, then reasoning and calls.

Joins the text side of the runtime with the parsers; both know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hotset.core.errors import RequestError
from hotset.runtime.text import Detokenizer, Text
from hotset.server.ask import Ask


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
    """Sorts text into pieces as it comes."""

    def feed(self, text: str) -> list[Piece]:
        """Pieces that this text completes."""

    def finish(self) -> list[Piece]:
        """What was held back, at the end."""


class AnswerText:
    """Text of an answer up to the first stop string; what may become one is held back.

    Args:
        text: makes text of ids.
        stops: strings, none empty.

    Attributes:
        stopped_by: the string that ended it; no more text comes then.
    """

    def __init__(self, text: Text, stops: Sequence[str]) -> None:
        self._stream = Detokenizer(text)
        self._stops = tuple(stops)
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Text that an id completes, before any stop string."""
        return self._cut(self._stream.push(token_id))

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        text = self._cut(self._stream.flush())
        text, self._held = text + self._held, ""
        return text

    def _cut(self, piece: str) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + piece
        # The stop that is whole first ends the text, however it was cut into pieces.
        found = [stop for stop in self._stops if stop in text]
        if found:
            self.stopped_by = min(
                found, key=lambda stop: (text.index(stop) + len(stop), -len(stop))
            )
            self._held = ""
            return text[: text.index(self.stopped_by)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that a stop string begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Plain:
    """Everything is content."""

    def feed(self, text: str) -> list[Piece]:
        """See `Speech`."""
        return [Piece(content=text)]

    def finish(self) -> list[Piece]:
        """See `Speech`."""
        return []


def make_speech(text: Text, ask: Ask) -> Speech:
    """What sorts the answers to a request.

    Raises:
        RequestError: tools or a schema, which are not supported yet.
    """
    if ask.tools and ask.tool_choice != "none":
        raise RequestError("`tools` are not supported yet", option="tools")
    if ask.schema is not None:
        raise RequestError("structured answers are not supported yet", option="response_format")
    return Plain()
