"""Which syntax a checkpoint uses, found in its chat template: the marks that it prints itself.

A template of no known family answers in Hermes' form if it has those marks; otherwise all is text.
"""

# ruff: noqa: RUF001 - DeepSeek's marks have wide bars

from __future__ import annotations

from hotset.server.parsers.base import Speech, Tools
from hotset.server.parsers.harmony import HarmonyParser
from hotset.server.parsers.json_calls import GRANITE_3, HERMES, HUNYUAN, MISTRAL
from hotset.server.parsers.marked import MarkedParser, Syntax
from hotset.server.parsers.token_calls import DEEPSEEK, KIMI
from hotset.server.parsers.xml_calls import DEEPSEEK_V4, DEEPSEEK_V32, GLM, MINIMAX, QWEN_XML

# Marks in a template -> its syntax; the first whose marks are all there.
_SYNTAXES: tuple[tuple[tuple[str, ...], Syntax], ...] = (
    (("<minimax:tool_call>",), MINIMAX),
    (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"), KIMI),
    (("<｜DSML｜tool_calls>",), DEEPSEEK_V4),
    (("<｜DSML｜", "function_calls"), DEEPSEEK_V32),
    (("<｜tool▁call▁begin｜>",), DEEPSEEK),
    (("<arg_key>",), GLM),
    (("<tool_call>", "<function="), QWEN_XML),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|tool_call|>",), GRANITE_3),
    (("<tool_calls>",), HUNYUAN),
    (("<tool_call>",), HERMES),
    (("<think>",), HERMES),
)
_HARMONY_MARKS = ("<|channel|>", "<|message|>")


def find_syntax(template: str) -> Syntax | None:
    """The syntax of a template with marks; `None` where it has none of those that are known."""
    for marks, syntax in _SYNTAXES:
        if all(mark in template for mark in marks):
            return syntax
    return None


def is_harmony(template: str) -> bool:
    """Whether answers are Harmony messages."""
    return all(mark in template for mark in _HARMONY_MARKS)


def make_parser(template: str | None, *, tools: Tools, prompt: str = "") -> Speech | None:
    """What sorts one answer.

    Args:
        template: source of the checkpoint's chat template.
        tools: of the request, name -> schema of its parameters; none if no call is wanted.
        prompt: the rendered prompt, special tokens kept, or its end: it may have opened the
            reasoning already.

    Returns:
        A parser of text with special tokens kept; `None` where all of an answer is content.
    """
    if not template:
        return None
    if is_harmony(template):
        return HarmonyParser(tools=tools)
    syntax = find_syntax(template)
    if syntax is None:
        return None
    opened = bool(syntax.think_open) and prompt.rstrip().endswith(syntax.think_open)
    return MarkedParser(syntax, tools=tools, in_reasoning=opened)
