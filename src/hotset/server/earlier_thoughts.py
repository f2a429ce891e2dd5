"""Reasoning of earlier turns, under the name that the chat template reads it by.

`reasoning_content` for most; gpt-oss and LFM2 read `thinking`, and gpt-oss refuses it beside
content of a turn that calls. Knows messages and the source of a template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hotset.server.ask import Message

_USUAL, _OTHER = "reasoning_content", "thinking"
_READS_OTHER = re.compile(
    r"""message(?:\.thinking\b|\[['"]thinking['"]\]|\.get\(['"]thinking['"])"""
    r"""|['"]thinking['"]\s+in\s+message"""
)
_CALL = {"id": "probe", "type": "function", "function": {"name": "probe", "arguments": {}}}
PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Soon.", _OTHER: "Hm.", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "probe", "content": "done"},
)
"""A turn that thinks, speaks and calls."""


def reads_other_name(template: str | None) -> bool:
    """Whether a template reads `thinking` of a message, and no `reasoning_content`."""
    source = template or ""
    return _USUAL not in source and _READS_OTHER.search(source) is not None


def renamed(messages: Sequence[Message], *, beside_content: Callable[[], bool]) -> list[Message]:
    """The same conversation, reasoning as `thinking`.

    Args:
        beside_content: whether the template takes it beside content of a turn that calls; where it
            does not, that content is the end of the reasoning.
    """
    made: list[Message] = []
    for message in messages:
        if _USUAL not in message:
            made.append(message)
            continue
        turn = {name: value for name, value in message.items() if name != _USUAL}
        turn[_OTHER] = message[_USUAL]
        if turn.get("tool_calls") and turn["content"] and not beside_content():
            turn[_OTHER] = f"{turn[_OTHER]}\n\n{turn['content']}"
            turn["content"] = ""
        made.append(turn)
    return made
