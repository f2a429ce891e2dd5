"""Items of OpenAI's responses: those of a request to a conversation, those of an answer from it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from hotset.server import wire
from hotset.server.ask import Call, Message, Whole
from hotset.server.chat_messages import template_call
from hotset.server.response_tools import Names, flat_name

_TEXTS = ("input_text", "output_text", "text")
Status = Literal["in_progress", "completed", "incomplete"]


class ItemText(wire.Part):
    """A piece of text; what an earlier answer noted beside it is of no consequence."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] | None = None


class MessageItem(wire.Part):
    """What somebody said; `phase` is what an earlier answer noted beside it."""

    type: Literal["message"] = "message"
    id: str | None = None
    role: Literal["user", "system", "developer", "assistant"]
    content: str | wire.Entries[ItemText]
    status: Status | None = None
    phase: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, value: object) -> object:
        return wire.check_parts(value, _TEXTS, "only text is supported")


class CallItem(wire.Part):
    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    namespace: str | None = None
    name: str
    arguments: str
    status: Status | None = None


class CallOutputItem(wire.Part):
    """What a function gave; which one it was, its call says."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str
    namespace: str | None = None
    name: str | None = None
    output: str | wire.Entries[ItemText]
    status: Status | None = None


class ReasoningText(wire.Part):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(wire.Part):
    """What was thought earlier; what another server has sealed of it cannot be read here."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: wire.Entries[ReasoningText] = Field(default_factory=list)
    content: wire.Entries[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


def _kind(value: object) -> str:
    """The tag of an item; a message may leave its type out."""
    given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return given if isinstance(given, str) else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def to_template(instructions: str | None, items: str | Sequence[InputItem]) -> list[Message]:
    """As chat templates take them: what the assistant thought, said and called in a row is one
    message.

    Raises:
        RequestError: arguments of an earlier call are no JSON object.
    """
    made: list[dict[str, Any]] = []
    if instructions is not None:
        made.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*made, {"role": "user", "content": items}]
    for number, item in enumerate(items):
        if isinstance(item, CallOutputItem):
            made.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": wire.joined(item.output)}
            )
        elif isinstance(item, MessageItem) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            made.append({"role": role, "content": wire.joined(item.content)})
        else:
            _add_to_turn(_turn(made), item, number)
    return list(made)


def _turn(made: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, a new one where there is none."""
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _add_to_turn(
    turn: dict[str, Any], item: MessageItem | CallItem | ReasoningItem, number: int
) -> None:
    if isinstance(item, MessageItem):
        turn["content"] += wire.joined(item.content)
    elif isinstance(item, CallItem):
        arguments = wire.json_object(item.arguments, name=f"input[{number}].arguments")
        name = flat_name(item.namespace, item.name)
        turn.setdefault("tool_calls", []).append(template_call(item.call_id, name, arguments))
    else:
        text = "".join(piece.text for piece in item.content or item.summary)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text


class Items:
    """Items of an answer, each as JSON."""

    @staticmethod
    def reasoning(text: str, status: str, *, item_id: str | None = None) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}] if text else []
        item_id = item_id or f"rs_{uuid.uuid4().hex}"
        return {
            "id": item_id,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "status": status,
        }

    @staticmethod
    def message(text: str | None, status: str, *, item_id: str | None = None) -> dict[str, Any]:
        """Args:
        text: `None` for a message that has no content yet.
        """
        content = [] if text is None else [Items.text(text)]
        item_id = item_id or f"msg_{uuid.uuid4().hex}"
        return {
            "id": item_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "status": status,
        }

    @staticmethod
    def text(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    @staticmethod
    def call(
        call: Call, status: str, names: Names, *, item_id: str | None = None
    ) -> dict[str, Any]:
        item = {
            "id": item_id or f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
            "status": status,
        }
        if call.name in names:
            item["namespace"], item["name"] = names[call.name]
        return item

    @staticmethod
    def of(choice: Whole, names: Names) -> list[dict[str, Any]]:
        """A whole answer: what was thought, said, called."""
        assert choice.finish is not None
        status = "incomplete" if choice.finish.reason == "length" else "completed"
        items = []
        if choice.reasoning:
            items.append(Items.reasoning(choice.reasoning, status))
        if choice.content or not choice.calls:
            items.append(Items.message(choice.content, status))
        for call in choice.calls:
            items.append(Items.call(call, status, names))
        return items
