"""Calls written as JSON: `{"name": ..., "arguments": {...}}`, one or a list of them.

Qwen3, granite, ERNIE, Ling (Hermes' form), Hunyuan, Mistral.
"""

from __future__ import annotations

import json

from hotset.server.parsers.base import Call, Tools, make_call
from hotset.server.parsers.marked import Syntax


def read_json_calls(body: str, tools: Tools) -> list[Call]:
    """See `ReadCalls`."""
    read = json.loads(body)
    calls = read if isinstance(read, list) else [read]
    return [
        make_call(call["name"], call.get("arguments", call.get("parameters", {}))) for call in calls
    ]


HERMES = Syntax(read_json_calls, "<tool_call>", "</tool_call>")
HUNYUAN = Syntax(read_json_calls, "<tool_calls>", "</tool_calls>")
GRANITE_3 = Syntax(read_json_calls, "<|tool_call|>", "")
MISTRAL = Syntax(read_json_calls, "[TOOL_CALLS]", "", think_open="[THINK]", think_close="[/THINK]")
