"""Events of a streamed response: each item is added, grows, and is done. Knows no request."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from hotset.server.ask import Call, Part, ToolPart
from hotset.server.response_items import Items
from hotset.server.response_tools import Names
from hotset.server.sse import event


class ItemEvents:
    """The items of one answer, as its parts come.

    Args:
        names: of tools that have a namespace.

    Attributes:
        output: items that are done.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self.output: list[dict[str, Any]] = []
        self._number = 0
        self._open: tuple[str, object] | None = None  # what tells the open item from the next
        self._item_id = self._text = ""
        self._tool: ToolPart | None = None

    def event(self, kind: str, **fields: Any) -> str:
        """One event with its place in the stream."""
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, name=kind)

    def of(self, part: Part) -> Iterator[str]:
        """Events of one part; the item before it is done where it begins another."""
        if part.reasoning:
            kind: tuple[str, object] = ("reasoning", None)
        elif part.content:
            kind = ("message", None)
        elif part.tool is not None:
            kind = ("function_call", part.tool.number)
        else:
            return
        if kind != self._open:
            yield from self.end("completed")
            yield from self._begin(kind, part)
        delta = part.reasoning or part.content or (part.tool.arguments if part.tool else "")
        self._text += delta
        name = {
            "reasoning": "response.reasoning_text.delta",
            "message": "response.output_text.delta",
            "function_call": "response.function_call_arguments.delta",
        }[kind[0]]
        if delta:
            extra: dict[str, Any] = {"logprobs": []} if kind[0] == "message" else {}
            yield self.event(name, **self._place(), delta=delta, **extra)

    def _begin(self, kind: tuple[str, object], part: Part) -> Iterator[str]:
        self._open, self._text, self._tool = kind, "", part.tool
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind[0]]
        self._item_id = f"{prefix}_{uuid.uuid4().hex}"
        yield self.event(
            "response.output_item.added",
            output_index=len(self.output),
            item=self._item("in_progress", begun=True),
        )
        if kind[0] != "function_call":
            yield self.event("response.content_part.added", **self._place(), part=self._part())

    def end(self, status: str) -> Iterator[str]:
        """The open item, if there is one, is done."""
        if self._open is None:
            return
        kind = self._open[0]
        if kind == "function_call":
            yield self.event(
                "response.function_call_arguments.done", **self._place(), arguments=self._text
            )
        else:
            name = "output_text" if kind == "message" else "reasoning_text"
            extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self.event(f"response.{name}.done", **self._place(), text=self._text, **extra)
            yield self.event("response.content_part.done", **self._place(), part=self._part())
        item = self._item(status)
        yield self.event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        self._open = None

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        place = {"item_id": self._item_id, "output_index": len(self.output)}
        return place if self._open[0] == "function_call" else {**place, "content_index": 0}

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        if self._open[0] == "message":
            return Items.text(self._text)
        return {"type": "reasoning_text", "text": self._text}

    def _item(self, status: str, *, begun: bool = False) -> dict[str, Any]:
        assert self._open is not None
        if self._open[0] == "reasoning":
            return Items.reasoning(self._text, status, item_id=self._item_id)
        if self._open[0] == "message":
            return Items.message(None if begun else self._text, status, item_id=self._item_id)
        assert self._tool is not None and self._tool.name is not None
        return Items.call(
            Call(self._tool.call_id, self._tool.name, self._text),
            status,
            self._names,
            item_id=self._item_id,
        )
