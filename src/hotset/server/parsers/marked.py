"""Answers in which marks set reasoning and calls apart: nearly all families.

A `Syntax` says which marks; this parser moves from one to the next. Text that may be the start of
a mark is held back. A call with JSON arguments is put out as it is written, any other one when its
end is there and it is sound. What is no call comes out as the text that it is, and so does a call
of a tool that the request does not have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hotset.server.parsers.base import (
    NO_CALLS,
    Call,
    Piece,
    ReadCalls,
    Tools,
    new_call_id,
    num_held,
)
from hotset.server.parsers.forms import AnswerForm, CallForm
from hotset.server.parsers.growing import GrowingCalls


@dataclass(frozen=True)
class Syntax:
    """The marks of a family.

    Attributes:
        read_calls: reads what stands between `call_open` and `call_close`.
        call_open: begins a call, or several.
        call_close: ends it; empty where it ends with the answer.
        call_alias: another spelling of `call_open`.
        form: how a call that must be made is written.
        call_head: what stands before JSON arguments, see `GrowingCalls`; `None` for others.
        think_open, think_close: around reasoning; empty where there is none.
        dropped: marks around all calls, which mean nothing here.
        wrappers: marks around the content.
        inner: begins and ends a call where the model leaves `call_open` or `call_close` out; what
            is read has them.
    """

    read_calls: ReadCalls
    call_open: str
    call_close: str
    form: CallForm
    call_head: re.Pattern[str] | None = None
    think_open: str = "<think>"
    think_close: str = "</think>"
    dropped: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    inner: tuple[str, str] | None = None
    call_alias: str = ""

    def answer_form(self, *, in_thought: bool) -> AnswerForm:
        """How an answer is written, its reasoning opened by the prompt or not."""
        thought = (self.think_open, self.think_close) if self.think_open else None
        return AnswerForm(self.form, thought, in_thought=in_thought)


class _In(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


class MarkedParser:
    """A `Speech` of one answer.

    Args:
        syntax: of the family.
        tools: of the request; without any, calls are text.
        in_reasoning: whether the prompt has opened the reasoning already.
        verbatim: content that has begun goes on to the end, whatever it looks like.
    """

    def __init__(
        self, syntax: Syntax, *, tools: Tools, in_reasoning: bool = False, verbatim: bool = False
    ) -> None:
        self._syntax, self._tools, self._verbatim = syntax, tools, verbatim
        self._growing: GrowingCalls | None = None
        self._in = _In.REASONING if in_reasoning else _In.CONTENT
        self._text = ""  # not looked at yet
        self._open = ""  # of the call that is open: the mark; no part of the body
        self._close = ""  # what ends it
        self._body = ""
        self._space = ""  # white space that only counts if text follows
        self._is_fresh = True  # nothing of this stretch was put out

    @property
    def in_reasoning(self) -> bool:
        """See `Speech`."""
        return self._in is _In.REASONING

    def feed(self, text: str) -> list[Piece]:
        """See `Speech`."""
        self._text += text
        pieces: list[Piece] = []
        while (found := self._next_mark()) is not None:
            place, mark = found
            self._take(self._text[:place], pieces)
            self._text = self._text[place + len(mark) :]
            self._pass(mark, pieces)
        held = num_held(self._text, self._marks())
        keep = len(self._text) - held
        self._take(self._text[:keep], pieces)
        self._text = self._text[keep:]
        return pieces

    def finish(self) -> list[Piece]:
        """See `Speech`."""
        pieces: list[Piece] = []
        self._take(self._text, pieces)
        self._text = ""
        if self._in is _In.CALL:
            self._end_call("", pieces)
        elif self._in is _In.CONTENT and self._space and not self._is_fresh:
            pieces.append(Piece(content=self._space))
        self._space = ""
        return pieces

    def _marks(self) -> tuple[str, ...]:
        """What may come next."""
        syntax = self._syntax
        if self._in is _In.CALL:
            return (self._close,) if self._close else ()
        if self._verbatim and self._in is _In.CONTENT and not self._is_fresh:
            return ()
        # Models open a call without closing their reasoning.
        opened = (syntax.call_open, *([syntax.call_alias] if syntax.call_alias else []))
        calls = (*opened, *syntax.dropped) if self._tools else ()
        if calls and syntax.inner is not None and self._in is _In.CONTENT:
            # Reasoning speaks of tags, and what it says of them must not hide the call behind it.
            calls += (syntax.inner[0], syntax.call_close)
        thinking = (syntax.think_open, syntax.think_close) if syntax.think_open else ()
        return (*calls, *thinking, *syntax.wrappers)

    def _next_mark(self) -> tuple[int, str] | None:
        """The first whole mark, the longest among those at one place."""
        found = [(self._text.find(mark), -len(mark), mark) for mark in self._marks()]
        first = min((entry for entry in found if entry[0] >= 0), default=None)
        if first is None:
            return None
        begun = self._verbatim and self._in is _In.CONTENT and self._text[: first[0]].strip()
        return None if begun else (first[0], first[2])

    def _take(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._in is _In.CALL:
            self._body += text
            if self._growing is not None:
                pieces += self._growing.feed(text)
            return
        text = self._space + text
        if self._is_fresh:
            text = text.lstrip()
        bare = text.rstrip()
        self._space = text[len(bare) :]
        if bare:
            self._is_fresh = False
            is_thought = self._in is _In.REASONING
            pieces.append(Piece(reasoning=bare) if is_thought else Piece(content=bare))

    def _pass(self, mark: str, pieces: list[Piece]) -> None:
        syntax = self._syntax
        if self._in is _In.CALL:
            self._end_call(mark, pieces)
        elif mark in (syntax.call_open, syntax.call_alias):
            self._in, self._open, self._close, self._body = _In.CALL, mark, syntax.call_close, ""
            if syntax.call_head is not None:
                self._growing = GrowingCalls(syntax.call_head, self._tools)
        elif syntax.inner is not None and mark == syntax.inner[0]:
            self._in, self._open, self._close, self._body = _In.CALL, "", syntax.inner[1], mark
        elif mark == syntax.think_open:
            self._turn(_In.REASONING)
        elif mark == syntax.think_close or mark in syntax.wrappers:
            self._turn(_In.CONTENT)

    def _turn(self, to: _In) -> None:
        self._in, self._space, self._is_fresh = to, "", True

    def _end_call(self, close: str, pieces: list[Piece]) -> None:
        """Puts out the calls that were not put out as they grew, or their text."""
        growing, self._growing = self._growing, None
        num_begun = 0 if growing is None else growing.num_begun
        if not self._open:
            self._body, close = self._body + close, ""
        whole = close == self._syntax.call_close or self._ends_within()
        calls = self._read(whole=whole)[num_begun:]
        if all(call.name in self._tools for call in calls) and (calls or num_begun):
            self._turn(_In.CONTENT)
            for call in calls:
                call_id = call.call_id or new_call_id()
                pieces.append(Piece(call_id=call_id, name=call.name, arguments=call.arguments))
            return
        text = self._space + self._open + self._body + close
        if growing is not None and num_begun:
            text = growing.rest
        self._in, self._space, self._is_fresh = _In.CONTENT, "", False
        pieces.append(Piece(content=text))

    def _ends_within(self) -> bool:
        inner = self._syntax.inner
        return inner is not None and self._body.rstrip().endswith(inner[1])

    def _read(self, *, whole: bool) -> Sequence[Call]:
        try:
            return self._syntax.read_calls(self._body, self._tools) if whole else ()
        except NO_CALLS:
            return ()
