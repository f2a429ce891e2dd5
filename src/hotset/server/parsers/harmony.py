"""gpt-oss's Harmony: messages with a header that names channel and recipient.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME<|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

Published by OpenAI (https://cookbook.openai.com/articles/openai-harmony). `<|call|>` and
`<|return|>` are stop ids and mostly do not come as text.
"""

from __future__ import annotations

import json
import re

from hotset.server.parsers.base import NO_CALLS, Piece, Tools, make_call, new_call_id, num_held
from hotset.server.parsers.forms import NAME, AnswerForm, CallForm
from hotset.server.parsers.growing import OBJECT, GrowingCalls

_MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
_MARK = re.compile("|".join(re.escape(mark) for mark in _MARKS))
# The model leaves the namespace out at times.
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
# The name, which the header has, on a line before the arguments.
_HEAD = re.compile(rf"(?P<name>[^\n]+)\n\s*{OBJECT}")

# A call ends its answer, with a stop id.
HARMONY_FORM = AnswerForm(
    CallForm(
        (f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>", ""),
        between=None,
    ),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    content="<|channel|>final<|message|>",
)


class HarmonyParser:
    """A `Speech` of one answer, which begins after `<|start|>assistant`.

    Args:
        tools: of the request.
    """

    def __init__(self, *, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        self._header: str | None = ""  # `None` within a message
        self._channel = ""
        self._call: str | None = None
        self._growing: GrowingCalls | None = None
        self._body = ""

    @property
    def in_reasoning(self) -> bool:
        """See `Speech`."""
        is_message = self._header is None and self._call is None
        return is_message and self._channel == "analysis"

    def feed(self, text: str) -> list[Piece]:
        """See `Speech`."""
        self._text += text
        pieces: list[Piece] = []
        while (match := _MARK.search(self._text)) is not None:
            self._take(self._text[: match.start()], pieces)
            self._text = self._text[match.end() :]
            self._pass(match[0], pieces)
        held = num_held(self._text, _MARKS)
        keep = len(self._text) - held
        self._take(self._text[:keep], pieces)
        self._text = self._text[keep:]
        return pieces

    def finish(self) -> list[Piece]:
        """See `Speech`."""
        pieces: list[Piece] = []
        self._take(self._text, pieces)
        self._text = ""
        self._end_message(pieces)
        return pieces

    def _take(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._header is not None:
            self._header += text
        elif self._growing is not None:
            self._body += text
            pieces += self._growing.feed(text)
        elif self._channel == "analysis":
            pieces.append(Piece(reasoning=text))
        else:
            pieces.append(Piece(content=text))

    def _pass(self, mark: str, pieces: list[Piece]) -> None:
        if mark == "<|message|>" and self._header is not None:
            self._begin_message()
        elif mark in ("<|end|>", "<|call|>", "<|return|>", "<|start|>"):
            self._end_message(pieces)
        elif self._header is not None:
            self._header += mark

    def _begin_message(self) -> None:
        header = self._header or ""
        recipient = _RECIPIENT.search(header)
        name = recipient[1] if recipient else None
        self._call = name if name in self._tools else None
        after = header.rpartition("<|channel|>")[2]
        self._channel = next(iter(after.split()), "final")
        self._header, self._body = None, ""
        if self._call is not None:
            self._growing = GrowingCalls(_HEAD, self._tools)
            self._growing.feed(f"{self._call}\n")

    def _end_message(self, pieces: list[Piece]) -> None:
        name, body, growing = self._call, self._body, self._growing
        self._header, self._call, self._body, self._growing = "", None, "", None
        if name is None or (growing is not None and growing.num_begun):
            return
        try:
            call = make_call(name, json.loads(body or "{}"))
        except NO_CALLS:
            pieces.append(Piece(content=body))
            return
        pieces.append(Piece(call_id=new_call_id(), name=call.name, arguments=call.arguments))
