"""Calls written as JSON: `{"name": ..., "arguments": {...}}`, one or a list of them.

Qwen3, granite, ERNIE, Ling (Hermes' form), Hunyuan, Mistral; Llama 4 writes them without marks.
"""

from __future__ import annotations

import json
import re

from hotset.server.parsers.base import Call, Tools, make_call
from hotset.server.parsers.forms import NAME, CallForm
from hotset.server.parsers.growing import OBJECT
from hotset.server.parsers.marked import Syntax

JSON_HEAD = re.compile(
    r'\s*(?:\}\s*)?[\[,;]?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,'
    rf'\s*"(?:arguments|parameters)"\s*:\s*{OBJECT}'
)


def read_json_calls(body: str, tools: Tools) -> list[Call]:
    """See `ReadCalls`."""
    read = json.loads(body)
    calls = read if isinstance(read, list) else [read]
    return [
        make_call(call["name"], call.get("arguments", call.get("parameters", {}))) for call in calls
    ]


_ONE = f'{{"name": "{NAME}", "arguments": '
_HERMES_FORM = CallForm((f"<tool_call>\n{_ONE}", "}\n</tool_call>"), between="\n")


def _list_form(begin: str, end: str) -> CallForm:
    return CallForm((_ONE, "}"), around=(f"{begin}[", f"]{end}"), between=", ")


HERMES = Syntax(read_json_calls, "<tool_call>", "</tool_call>", _HERMES_FORM, JSON_HEAD)
ERNIE = Syntax(
    read_json_calls,
    "<tool_call>",
    "</tool_call>",
    _HERMES_FORM,
    JSON_HEAD,
    wrappers=("<response>", "</response>"),
)
HUNYUAN = Syntax(
    read_json_calls,
    "<tool_calls>",
    "</tool_calls>",
    _list_form("<tool_calls>", "</tool_calls>"),
    JSON_HEAD,
    wrappers=("<answer>", "</answer>"),
)
GRANITE_3 = Syntax(
    read_json_calls,
    "<|tool_call|>",
    "",
    _list_form("<|tool_call|>", ""),
    JSON_HEAD,
    call_alias="<tool_call>",  # granite 3.1, whose tokenizer has it as plain text
)
MISTRAL = Syntax(
    read_json_calls,
    "[TOOL_CALLS]",
    "",
    _list_form("[TOOL_CALLS] ", ""),
    JSON_HEAD,
    think_open="[THINK]",
    think_close="[/THINK]",
)
