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

    begins_apart = False

    def feed(self, text: str) -> list[Piece]:
        """See `Speech`."""
        return [Piece(content=text)]

    def finish(self) -> list[Piece]:
        """See `Speech`."""
        return []


def make_speech(text: Text, ask: Ask, prompt_ids: Sequence[int]) -> Speech:
    """What sorts the answers to a request.

    Args:
        text: of the model.
        ask: the request.
        prompt_ids: its prompt, which may have opened the reasoning already.

    Raises:
        RequestError: tools of a model whose calls are not understood, or a schema or forced call
            where the answer does not begin with it.
    """
    if ask.messages is None:
        return Plain()
    wanted = ask.tools if ask.tool_choice != "none" else ()
    prompt = text.decode(prompt_ids[-_PROMPT_END:], keep_special=True)
    tools = {tool.name: tool.parameters for tool in wanted}
    parser = make_parser(text.chat_template, tools=tools, prompt=prompt)
    if ask.schema is not None:
        if wanted:
            raise RequestError(
                "`response_format` cannot be combined with `tools`", option="response_format"
            )
        _check_beginning(parser, "response_format")
        return Plain()
    if wanted and parser is None:
        raise RequestError("how this model calls `tools` is not known", option="tools")
    if wanted and ask.tool_choice != "auto":
        _check_beginning(parser, "tool_choice")
    return parser or Plain()


def _check_beginning(parser: Speech | None, option: str) -> None:
    """What an option asks for holds from the first token on, so nothing may come before it."""
    if parser is not None and parser.begins_apart:
        raise RequestError(
            f"this model's answer begins with reasoning, which `{option}` does not allow",
            hint="turn it off, with `chat_template_kwargs` such as `{'enable_thinking': false}`",
            option=option,
        )
