"""What the tokens of one answer have to follow: a schema, or the form of a call that must be made.

Calls are forced in Hermes' form alone, JSON between two marks; values of other forms stand without
quotes, so that a schema of theirs would have to become a grammar of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from hotset.core.errors import RequestError
from hotset.core.request import TokenMatcher
from hotset.runtime.grammar import GrammarCompiler
from hotset.runtime.text import Text
from hotset.server.ask import Ask, Tool
from hotset.server.parsers.json_calls import HERMES
from hotset.server.parsers.registry import find_syntax


def make_matcher(text: Text, ask: Ask) -> TokenMatcher | None:
    """For one answer; `None` leaves it free.

    Args:
        text: of the model.
        ask: the request.

    Raises:
        RequestError: a schema that cannot be held to, a `tool_choice` without its tool, or a model
            that writes calls in another form.
        ConfigError: the library for grammars is not installed.
    """
    if ask.schema is not None:
        return text.grammars.json_schema(ask.schema)
    if ask.tool_choice in ("auto", "none"):
        return None
    named = ask.tool_choice != "required"
    tools = [tool for tool in ask.tools if not named or tool.name == ask.tool_choice]
    if not tools:
        raise _refused(ask, "`tools` has no such tool" if named else "there are no `tools`")
    template = text.chat_template or ""
    # The marks themselves too: a template that only reasons falls to Hermes' form as well.
    if HERMES.call_open not in template or find_syntax(template) is not HERMES:
        raise _refused(ask, "calls of this model's form cannot be forced, only `auto` and `none`")
    many = ask.parallel_calls and not named
    return text.grammars.lark(_calls(text.grammars, tools, many=many), what="schema of the tools")


def _calls(grammars: GrammarCompiler, tools: Sequence[Tool], *, many: bool) -> str:
    """Lark of one call, or of one and more on lines of their own, as templates print them."""
    opens, closes = grammars.mark(HERMES.call_open), grammars.mark(HERMES.call_close)
    any_tool = " | ".join(f"tool_{number}" for number in range(len(tools)))
    rules = [
        'start: call ("\\n" call)*' if many else "start: call",
        f'call: {opens} "\\n" ({any_tool}) "\\n" {closes}',
    ]
    for number, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        rules.append(f'tool_{number}: {head} {grammars.json_rule(tool.parameters)} "}}"')
    return "\n".join(rules)


def _refused(ask: Ask, reason: str) -> RequestError:
    return RequestError(f"`tool_choice` is `{ask.tool_choice}`: {reason}", option="tool_choice")
