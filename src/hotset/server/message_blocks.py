"""Anthropic's content blocks, and what chat templates take instead. Text only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from hotset.core.errors import RequestError
from hotset.server import wire
from hotset.server.ask import Message
from hotset.server.chat_messages import template_call


class Cached(wire.Part):
    """`cache_control` changes nothing of an answer: prefixes are kept anyway."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Cached):
    type: Literal["text"]
    text: str


class SystemText(TextBlock):
    """A piece of the system prompt."""


class ThinkingBlock(wire.Part):
    """What the model thought earlier; there is nothing to sign here."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(wire.Part):
    """What another server has sealed: it cannot be read here, and is left out."""

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(Cached):
    """A call that the model made earlier; `caller` says that it was the model itself."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResultBlock(Cached):
    """What a tool gave. Templates know no `is_error`: the text has to say it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | wire.Entries[TextBlock] = ""
    is_error: bool = False


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
# Claude Code's first words, other ones in each request: they are no instruction, and no prompt that
# begins with them has a prefix that was kept.
_BILLING = "x-anthropic-billing-header:"
_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class MessageParam(wire.Part):
    """One turn. Claude Code instructs in the middle of a conversation, as `system`."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[wire.Entries[Block], Field(min_length=1)]

    @field_validator("content", mode="before")
    @classmethod
    def _known_blocks(cls, value: object) -> object:
        return wire.check_parts(value, _KINDS, "it is not supported")


def to_template(
    system: str | Sequence[SystemText] | None, messages: Sequence[MessageParam]
) -> list[Message]:
    """As chat templates take them.

    Raises:
        RequestError: a block in a turn of the wrong role, or the last turn is the assistant's.
    """
    if messages[-1].role == "assistant":
        raise RequestError(
            "the last message is the assistant's; to go on with it is not supported",
            option="messages",
        )
    made: list[Message] = []
    if isinstance(system, str):
        made.append({"role": "system", "content": system})
    elif system is not None:
        said = [part for part in system if not part.text.startswith(_BILLING)]
        made += [{"role": "system", "content": wire.joined(said)}] if said else []
    for number, message in enumerate(messages):
        if isinstance(message.content, str):
            made.append({"role": message.role, "content": message.content})
        else:
            turn = {"user": _of_user, "assistant": _of_assistant, "system": _of_system}
            made += turn[message.role](message.content, f"messages[{number}].content")
    return made


def _of_system(blocks: Sequence[Block], where: str) -> list[Message]:
    for number, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            raise _misplaced(block, f"{where}[{number}]", "system")
    return [
        {"role": "system", "content": wire.joined([b for b in blocks if isinstance(b, TextBlock)])}
    ]


def _of_user(blocks: Sequence[Block], where: str) -> list[Message]:
    """Results become messages of the tools; what is said beside them comes after."""
    made: list[Message] = []
    texts = []
    for number, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            text = wire.joined(block.content)
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        else:
            raise _misplaced(block, f"{where}[{number}]", "user")
    if texts:
        made.append({"role": "user", "content": "".join(texts)})
    return made


def _of_assistant(blocks: Sequence[Block], where: str) -> list[Message]:
    text, thinking, calls = "", "", []
    for number, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            text += block.text
        elif isinstance(block, ThinkingBlock):
            thinking += block.thinking
        elif isinstance(block, ToolUseBlock):
            calls.append(template_call(block.id, block.name, block.input))
        elif not isinstance(block, RedactedThinkingBlock):
            raise _misplaced(block, f"{where}[{number}]", "assistant")
    made: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        made["reasoning_content"] = thinking
    if calls:
        made["tool_calls"] = calls
    return [made]


def _misplaced(block: Block, where: str, role: str) -> RequestError:
    return RequestError(f"`{where}` is a `{block.type}` in a turn of `{role}`", option=where)
