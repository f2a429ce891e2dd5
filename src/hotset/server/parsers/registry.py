"""Which syntax a checkpoint uses, found in its chat template: the marks that it prints itself.

A template of no known family answers in Hermes' form if it has those marks; otherwise all is text.
"""

# ruff: noqa: RUF001 - DeepSeek's marks have wide bars

from __future__ import annotations

from hotset.server.parsers.bare_calls import JSON_FORM, LFM2, PYTHON_FORM, BareCallParser
from hotset.server.parsers.base import Speech, Tools
from hotset.server.parsers.forms import AnswerForm
from hotset.server.parsers.gemma_calls import GEMMA
from hotset.server.parsers.harmony import HARMONY_FORM, HarmonyParser
from hotset.server.parsers.json_calls import ERNIE, GRANITE_3, HERMES, HUNYUAN, MISTRAL
from hotset.server.parsers.marked import MarkedParser, Syntax
from hotset.server.parsers.token_calls import DEEPSEEK_V3, DEEPSEEK_V31, KIMI, MISTRAL_ARGS
from hotset.server.parsers.xml_calls import DEEPSEEK_V4, DEEPSEEK_V32, GLM, MINIMAX, QWEN_XML

# Marks in a template -> its syntax; the first whose marks are all there.
_SYNTAXES: tuple[tuple[tuple[str, ...], Syntax], ...] = (
    (("<minimax:tool_call>",), MINIMAX),
    (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"), KIMI),
    (("<｜DSML｜tool_calls>",), DEEPSEEK_V4),
    (("<｜DSML｜", "function_calls"), DEEPSEEK_V32),
    (("<｜tool▁call▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁call▁begin｜>",), DEEPSEEK_V31),
    (("<|tool_call>",), GEMMA),
    (("<arg_key>",), GLM),
    (("<tool_call>", "<function="), QWEN_XML),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|tool_call_start|>",), LFM2),
    (("<|tool_list_start|>",), LFM2),
    (("<|tool_call|>",), GRANITE_3),
    (("<tool_calls>",), HUNYUAN),
    (("<tool_call>", "<response>"), ERNIE),
    (("<tool_call>",), HERMES),
    (("<think>",), HERMES),
)
_HARMONY_MARKS = ("<|channel|>", "<|message|>")
_LLAMA_4_MARK = "<|header_start|>"


def find_syntax(template: str) -> Syntax | None:
    """The syntax of a template with marks; `None` where it has none of those that are known."""
    for marks, syntax in _SYNTAXES:
        if all(mark in template for mark in marks):
            return syntax
    return None


def _is_harmony(template: str) -> bool:
    return all(mark in template for mark in _HARMONY_MARKS)


def make_parser(
    template: str | None, *, tools: Tools, prompt: str = "", verbatim: bool = False
) -> Speech | None:
    """What sorts one answer.

    Args:
        template: source of the checkpoint's chat template.
        tools: of the request, name -> schema of its parameters; none if no call is wanted.
        prompt: the rendered prompt, special tokens kept, or its end: it may have opened the
            reasoning already.
        verbatim: content that has begun goes on to the end, whatever it looks like.

    Returns:
        A parser of text with special tokens kept; `None` where all of an answer is content.
    """
    if not template:
        return None
    if _is_harmony(template):
        return HarmonyParser(tools=tools)
    syntax = find_syntax(template)
    if syntax is not None:
        opened = _is_opened(syntax, prompt)
        return MarkedParser(syntax, tools=tools, in_reasoning=opened, verbatim=verbatim)
    return BareCallParser(tools=tools) if tools and _LLAMA_4_MARK in template else None


def find_form(template: str | None, *, prompt: str = "") -> AnswerForm | None:
    """How answers are written; see `make_parser`, which reads the same.

    Returns:
        `None` for a family that is not known.
    """
    if not template:
        return None
    if _is_harmony(template):
        return HARMONY_FORM
    syntax = find_syntax(template)
    if syntax is not None:
        return syntax.answer_form(in_thought=_is_opened(syntax, prompt))
    if _LLAMA_4_MARK in template:
        return JSON_FORM if '"parameters"' in template else PYTHON_FORM
    return None


def calls_tools(template: str) -> bool:
    """Whether a template has the marks of calls; one that only reasons falls to Hermes' form."""
    syntax = find_syntax(template)
    return syntax is None or syntax.call_open in template


def reasons(template: str | None) -> bool:
    """Whether a template has the mark before reasoning: its model reasons, or can."""
    form = find_form(template)
    if form is None or form.thought is None:
        return False
    return form.thought[0].strip() in (template or "")


def _is_opened(syntax: Syntax, prompt: str) -> bool:
    return bool(syntax.think_open) and prompt.rstrip().endswith(syntax.think_open)
