"""What a model says, from ids to text to pieces: stop strings first, then reasoning and calls.

Joins the text side of the runtime with the parsers; both know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotset.core.errors import RequestError
from hotset.runtime.text import Detokenizer, Text
from hotset.server.ask import Ask
from hotset.server.parsers.base import Piece, Speech, num_held
from hotset.server.parsers.registry import make_parser

__all__ = ["AnswerText", "Piece", "Plain", "Speech", "make_speech"]

# Tokens at the end of a prompt that may open the reasoning.
_PROMPT_END = 8


class AnswerText:
    """Text of an answer up to the first stop string; what may become one is held back.

    Args:
        text: makes text of ids.
        stops: strings, none empty.
        keep_special: special tokens come by their names.

    Attributes:
        stopped_by: the string that ended it; no more text comes then.
    """

    def __init__(self, text: Text, stops: Sequence[str], *, keep_special: bool = False) -> None:
        self._stream = Detokenizer(text, keep_special=keep_special)
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
        keep = num_held(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class Plain:
    """Everything is content."""

    in_reasoning = False

    def feed(self, text: str) -> list[Piece]:
        """See `Speech`."""
        return [Piece(content=text)]

    def finish(self) -> list[Piece]:
        """See `Speech`."""
        return []


def prompt_end(text: Text, prompt_ids: Sequence[int]) -> str:
    """The end of a prompt, which may have opened the reasoning."""
    return text.decode(prompt_ids[-_PROMPT_END:], keep_special=True)


def make_speech(text: Text, ask: Ask, prompt_ids: Sequence[int]) -> Speech:
    """What sorts the answers to a request.

    Args:
        text: of the model.
        ask: the request.
        prompt_ids: its prompt, which may have opened the reasoning already.

    Raises:
        RequestError: tools of a model whose calls are not understood.
    """
    if ask.messages is None:
        return Plain()
    wanted = ask.tools if ask.tool_choice != "none" else ()
    parser = make_parser(
        text.chat_template,
        tools={tool.name: tool.parameters for tool in wanted},
        prompt=prompt_end(text, prompt_ids),
        # What a schema allows within a text may look like a mark.
        verbatim=ask.schema is not None,
    )
    if wanted and parser is None:
        raise RequestError("how this model calls `tools` is not known", option="tools")
    return parser or Plain()
