"""Arguments of earlier calls: an object for most chat templates, JSON text for those that only
paste it (DeepSeek V3 to V3.1). Knows messages, and no template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from hotset.server.ask import Message

_KEY = "hotset-key"


def _probe(arguments: object) -> tuple[Message, ...]:
    function = {"name": "probe", "arguments": arguments}
    call = {"id": "probe", "type": "function", "function": function}
    return (
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "probe", "content": "done"},
    )


def wants_text(render: Callable[[Sequence[Message]], str | None]) -> bool:
    """Whether a template prints arguments as they should be only if they are text.

    Args:
        render: messages -> what the template makes of them, `None` where it refuses them.
    """
    arguments = {_KEY: True}
    of_object = render(_probe(arguments))
    if of_object is not None and repr(arguments) not in of_object:
        return False
    of_text = render(_probe(json.dumps(arguments)))
    return of_text is not None and json.dumps(arguments) in of_text


def with_text(messages: Sequence[Message]) -> list[Message]:
    """The same conversation, arguments of calls as JSON text."""
    return [
        {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
