"""Calls set apart by special tokens, with JSON arguments: DeepSeek V3 to V3.1, Kimi K2, and Mistral
since its tokenizer v11.
"""

# ruff: noqa: RUF001 - DeepSeek's marks have wide bars

from __future__ import annotations

import json
import re

from hotset.server.parsers.base import Call, Tools, make_call
from hotset.server.parsers.forms import NAME, NUMBER, CallForm
from hotset.server.parsers.growing import OBJECT
from hotset.server.parsers.marked import Syntax

_FENCED = re.compile(r"\s*(?:function)?<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n?```\s*", re.DOTALL)
_PLAIN = re.compile(r"\s*([^<\n]+)<｜tool▁sep｜>(.*)", re.DOTALL)
_KIMI = re.compile(
    r"\s*((?:functions\.)?([^:\s]+):\d+)\s*<\|tool_call_argument_begin\|>(.*)", re.DOTALL
)
_MISTRAL_HEAD = re.compile(
    r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[^\s\[\]{}]+)\s*"
    r"(?:\[CALL_ID\]\s*(?P<id>[^\s\[]+)\s*)?(?:\[ARGS\])?\s*" + OBJECT
)
_DEEPSEEK_HEAD = re.compile(
    r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^<\n]+?)\s*(?:<｜tool▁sep｜>|\n```json\n)\s*" + OBJECT
)
_KIMI_HEAD = re.compile(
    r"\s*(?P<id>(?:functions\.)?(?P<name>[^:\s]+):\d+)\s*<\|tool_call_argument_begin\|>\s*" + OBJECT
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


def read_mistral_calls(body: str, tools: Tools) -> list[Call]:
    """See `ReadCalls`. The mark that begins a call stands before each."""
    calls, at = [], 0
    while body[at:].strip():
        match = _MISTRAL_HEAD.match(body, at)
        if match is None:
            raise ValueError("not a call")
        arguments, at = json.JSONDecoder().raw_decode(body, match.end())
        calls.append(make_call(match["name"], arguments, match["id"]))
    return calls


_DEEPSEEK_ALL = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI_ALL = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


def _deepseek(form: CallForm) -> Syntax:
    return Syntax(
        read_deepseek_calls,
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        form,
        _DEEPSEEK_HEAD,
        dropped=_DEEPSEEK_ALL,
    )


DEEPSEEK_V3 = _deepseek(
    CallForm(
        (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n",
            "\n```<｜tool▁call▁end｜>",
        ),
        around=_DEEPSEEK_ALL,
        between="\n",
    )
)
DEEPSEEK_V31 = _deepseek(
    CallForm(
        (f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        around=_DEEPSEEK_ALL,
    )
)
KIMI = Syntax(
    read_kimi_calls,
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    CallForm(
        (
            f"<|tool_call_begin|>functions.{NAME}:{NUMBER}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        around=_KIMI_ALL,
    ),
    _KIMI_HEAD,
    dropped=_KIMI_ALL,
)
MISTRAL_ARGS = Syntax(
    read_mistral_calls,
    "[TOOL_CALLS]",
    "",
    CallForm((f"[TOOL_CALLS]{NAME}[ARGS]", "")),
    _MISTRAL_HEAD,
    think_open="[THINK]",
    think_close="[/THINK]",
)
