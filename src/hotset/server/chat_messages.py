"""OpenAI's messages, and what chat templates take instead. Text only: other parts are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from hotset.server import wire
from hotset.server.ask import Message


class TextPart(wire.Part):
    """A piece of a message's text. `cache_control` changes nothing of an answer: prefixes are kept
    anyway."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None


class CalledFunction(wire.Part):
    name: str
    arguments: str = ""


class MadeCall(wire.Part):
    """A call that the model made earlier. `index` is left in it by who put a stream together."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(wire.Part):
    """One message. Which fields it may have depends on its role.

    Attributes:
        role: who speaks.
        content: text, or pieces of it.
        name: of the speaker; templates that know none leave it out.
        tool_calls: of an assistant.
        tool_call_id: which call a tool answers.
        reasoning_content, reasoning: of an assistant, for models that want to see it again.
        annotations, provider_specific_fields: what clients keep beside an answer; no text.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | wire.Entries[TextPart] | None = None
    name: str | None = None
    tool_calls: wire.Entries[MadeCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, value: object) -> object:
        return wire.check_parts(value, ("text",), "only `text` is supported")

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.role == "assistant":
            said = (self.content, self.refusal, self.reasoning_content, self.reasoning)
            if not self.tool_calls and all(text is None for text in said):
                raise ValueError("a message of `assistant` needs `content` or `tool_calls`")
            return self
        if self.content is None:
            raise ValueError(f"a message of `{self.role}` needs `content`")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of `tool` needs `tool_call_id`")
        of_assistant = ("tool_calls", "reasoning_content", "reasoning", "refusal", "annotations")
        for name in of_assistant:
            if getattr(self, name) is not None:
                raise ValueError(f"`{name}` is for `assistant`, not for `{self.role}`")
        return self

    @property
    def text(self) -> str:
        """Its content in one piece."""
        return wire.joined(self.content or self.refusal or "")


def to_template(messages: Sequence[ChatMessage]) -> list[Message]:
    """As chat templates take them: texts in one piece, arguments as objects.

    Raises:
        RequestError: arguments of an earlier call are no JSON object.
    """
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: ChatMessage, number: int) -> Message:
    # Few templates know the role that OpenAI calls its system messages by.
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        made["reasoning_content"] = reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            template_call(
                call.id,
                call.function.name,
                wire.json_object(
                    call.function.arguments,
                    name=f"messages[{number}].tool_calls[{index}].function.arguments",
                ),
            )
            for index, call in enumerate(message.tool_calls)
        ]
    return made


def template_call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """An earlier call, as chat templates take it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
