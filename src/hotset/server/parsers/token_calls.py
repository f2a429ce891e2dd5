"""Calls set apart by special tokens, with JSON arguments: DeepSeek V3 to V3.1, Kimi K2."""

# ruff: noqa: RUF001 - DeepSeek's marks have wide bars

from __future__ import annotations

import json
import re

from hotset.server.parsers.base import Call, Tools, make_call
from hotset.server.parsers.marked import Syntax

_FENCED = re.compile(r"\s*(?:function)?<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n?```\s*", re.DOTALL)
_PLAIN = re.compile(r"\s*([^<\n]+)<｜tool▁sep｜>(.*)", re.DOTALL)
_KIMI = re.compile(
    r"\s*((?:functions\.)?([^:\s]+):\d+)\s*<\|tool_call_argument_begin\|>(.*)", re.DOTALL
)


def read_deepseek_calls(body: str, tools: Tools) -> list[Call]:
    """See `ReadCalls`. V3 writes `function<sep>NAME` and fenced JSON, V3.1 `NAME<sep>JSON`."""
    match = _FENCED.fullmatch(body) or _PLAIN.fullmatch(body)
    if match is None:
        raise ValueError("not a call")
    return [make_call(match[1].strip(), json.loads(match[2]))]


def read_kimi_calls(body: str, tools: Tools) -> list[Call]:
    """See `ReadCalls`. The id is the model's own, and it wants to read it again."""
    match = _KIMI.fullmatch(body)
    if match is None:
        raise ValueError("not a call")
    return [make_call(match[2], json.loads(match[3]), match[1])]


DEEPSEEK = Syntax(
    read_deepseek_calls,
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
KIMI = Syntax(
    read_kimi_calls,
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
