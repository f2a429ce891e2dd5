"""Calls written as tags, with a tag for each parameter: Qwen3-Coder and Qwen3.5, MiniMax-M2, GLM.

Values stand without quotes; what type they have is the schema's business.
"""

# ruff: noqa: RUF001 - DeepSeek's marks have wide bars

from __future__ import annotations

import re

from hotset.server.parsers.base import Call, Tools, make_call, parameter, typed
from hotset.server.parsers.forms import KEY, LINE, NAME, CallForm, ParameterForm
from hotset.server.parsers.marked import Syntax


def _element(begin: str, end: str) -> re.Pattern[str]:
    """One of several elements. An end within its value is not its end: another element follows
    that, or nothing."""
    follows = re.match(r"<[^\s>(\[]+", begin)
    assert follows is not None
    pattern = rf"\s*{begin}(.*?){end}\s*+(?={follows[0]}|\Z)"
    return re.compile(pattern, re.DOTALL)


_QWEN_CALL = _element(r"<function=([^>\s]+)>", "</function>")
_QWEN_PARAMETER = _element(r"<parameter=([^>\s]+)>", "</parameter>")
_MINIMAX_CALL = _element(r'<invoke name="?([^">]+)"?>', "</invoke>")
_MINIMAX_PARAMETER = _element(r'<parameter name="?([^">]+)"?>', "</parameter>")
_DSML_CALL = _element(r'<｜DSML｜invoke name="([^"]+)">', "</｜DSML｜invoke>")
_DSML_PARAMETER = _element(
    r'<｜DSML｜parameter name="([^"]+)"(?: string="(true|false)")?>', "</｜DSML｜parameter>"
)
_GLM_ARGUMENT = _element(r"<arg_key>(.*?)</arg_key>\s*<arg_value>", "</arg_value>")


def _whole(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Matches that together are all of a text.

    Raises:
        ValueError: something lies between them.
    """
    found, end = [], 0
    while end < len(text):
        match = pattern.match(text, end)
        if match is None:
            if text[end:].strip():
                raise ValueError("not a call")
            break
        found.append(match)
        end = match.end()
    return found


def _read(body: str, tools: Tools, call: re.Pattern[str], value: re.Pattern[str]) -> list[Call]:
    calls = []
    for match in _whole(call, body):
        name = match[1]
        arguments = {
            # One newline on either side is layout, as the templates print it.
            entry[1]: typed(_unwrapped(entry[2]), parameter(tools, name, entry[1]))
            for entry in _whole(value, match[2])
        }
        calls.append(make_call(name, arguments))
    return calls


def _unwrapped(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def read_qwen_calls(body: str, tools: Tools) -> list[Call]:
    """See `ReadCalls`."""
    return _read(body, tools, _QWEN_CALL, _QWEN_PARAMETER)


def read_minimax_calls(body: str, tools: Tools) -> list[Call]:
    """See `ReadCalls`."""
    return _read(body, tools, _MINIMAX_CALL, _MINIMAX_PARAMETER)


def read_dsml_calls(body: str, tools: Tools) -> list[Call]:
    """See `ReadCalls`. A parameter says itself whether it is text."""
    calls = []
    for match in _whole(_DSML_CALL, body):
        arguments: dict[str, object] = {}
        for name, is_text, value in (entry.groups() for entry in _whole(_DSML_PARAMETER, match[2])):
            known = {"type": "string" if is_text == "true" else "any"} if is_text else None
            arguments[name] = typed(value, known or parameter(tools, match[1], name))
        calls.append(make_call(match[1], arguments))
    return calls


def read_glm_calls(body: str, tools: Tools) -> list[Call]:
    """See `ReadCalls`. The name stands before the first argument, on a line of its own or not."""
    name, tag, rest = body.partition("<arg_key>")
    name = name.strip()
    arguments = {
        entry[1].strip(): typed(entry[2], parameter(tools, name, entry[1].strip()))
        for entry in _whole(_GLM_ARGUMENT, tag + rest)
    }
    return [make_call(name, arguments)]


_QWEN_FORM = CallForm(
    (f"<tool_call>\n<function={NAME}>\n", "</function>\n</tool_call>"),
    between="\n",
    parameters=ParameterForm(
        json=(f"<parameter={KEY}>\n", "\n</parameter>"),
        text=(f"<parameter={KEY}>\n", "</parameter>"),
        after="\n",
    ),
)
_MINIMAX_FORM = CallForm(
    (f'<invoke name="{NAME}">\n', "</invoke>\n"),
    around=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    parameters=ParameterForm(
        json=(f'<parameter name="{KEY}">', "</parameter>"),
        text=(f'<parameter name="{KEY}">', "</parameter>"),
        after="\n",
    ),
)
# GLM-4.5 and 4.6 break lines, GLM-4.7 and later ones do not.
_GLM_VALUE = (f"<arg_key>{KEY}</arg_key>{LINE}<arg_value>", "</arg_value>")
_GLM_FORM = CallForm(
    (f"<tool_call>{NAME}{LINE}", "</tool_call>"),
    between=LINE,
    parameters=ParameterForm(json=_GLM_VALUE, text=_GLM_VALUE, after=LINE),
)


def _dsml(kind: str) -> Syntax:
    begin, end = f"<｜DSML｜{kind}>", f"</｜DSML｜{kind}>"
    close = "</｜DSML｜parameter>"
    parameters = ParameterForm(
        json=(f'<｜DSML｜parameter name="{KEY}" string="false">', close),
        text=(f'<｜DSML｜parameter name="{KEY}" string="true">', close),
        after="\n",
    )
    form = CallForm(
        (f'<｜DSML｜invoke name="{NAME}">\n', "</｜DSML｜invoke>\n"),
        around=(f"{begin}\n", end),
        parameters=parameters,
    )
    return Syntax(read_dsml_calls, begin, end, form)


QWEN_XML = Syntax(
    read_qwen_calls,
    "<tool_call>",
    "</tool_call>",
    _QWEN_FORM,
    # Qwen3-Coder and those that learned from it leave the outer marks out at times.
    inner=("<function=", "</function>"),
)
MINIMAX = Syntax(read_minimax_calls, "<minimax:tool_call>", "</minimax:tool_call>", _MINIMAX_FORM)
GLM = Syntax(read_glm_calls, "<tool_call>", "</tool_call>", _GLM_FORM)
DEEPSEEK_V32, DEEPSEEK_V4 = _dsml("function_calls"), _dsml("tool_calls")
