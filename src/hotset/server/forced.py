"""What the tokens of one answer have to follow: a schema, calls that must be made, or either.

Reasoning that comes first stays free, as the model writes it, up to the tokens that it may take. Of
how calls look it knows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotset.core.errors import RequestError
from hotset.core.request import TokenMatcher
from hotset.runtime.grammar import GrammarCompiler
from hotset.runtime.text import Text
from hotset.server.ask import Ask, Tool
from hotset.server.call_grammar import CallGrammar
from hotset.server.parsers.forms import AnswerForm
from hotset.server.parsers.registry import calls_tools, find_form
from hotset.server.speech import prompt_end
from hotset.server.thought_budget import ThoughtBudget


def make_matcher(text: Text, ask: Ask, prompt_ids: Sequence[int]) -> TokenMatcher | None:
    """For one answer; `None` leaves it free.

    Args:
        text: of the model.
        ask: the request.
        prompt_ids: its prompt, which may have opened the reasoning already.

    Raises:
        RequestError: a schema that cannot be held to, a `tool_choice` without its tool, or a model
            whose calls are not known.
        ConfigError: the library for grammars is not installed.
    """
    form = _form(text, ask, prompt_ids)
    inner = _structure(text, ask, form)
    # Where nothing is known of how a model reasons, nothing is taken for its reasoning.
    if ask.most_thought is None or form is None or form.thought is None:
        return inner
    begin, end = map(text.encode_part, form.thought)
    return ThoughtBudget(
        ask.most_thought, begin=() if form.in_thought else begin, end=end, inner=inner
    )


def _form(text: Text, ask: Ask, prompt_ids: Sequence[int]) -> AnswerForm | None:
    template = text.chat_template if ask.messages is not None else None
    return find_form(template, prompt="" if template is None else prompt_end(text, prompt_ids))


def _structure(text: Text, ask: Ask, form: AnswerForm | None) -> TokenMatcher | None:
    """A schema and calls; `None` where there are none that must be followed."""
    tools, many = _wanted(ask)
    if ask.tool_choice in ("auto", "none") and ask.schema is None:
        return None
    must_call = ask.tool_choice not in ("auto", "none")
    if form is None and not tools:
        assert ask.schema is not None
        return text.grammars.json_schema(ask.schema)
    if form is None or (tools and not calls_tools(text.chat_template or "")):
        raise RequestError("how this model calls `tools` is not known", option="tools")
    rules = _thought(text.grammars, form)
    bodies = []
    if tools:
        bodies.append("calls")
        rules += CallGrammar(text.grammars, form.calls).rules(tools, many=many)
    if ask.schema is not None and not must_call:
        bodies.append("content")
        rules.append(f"content: {_content(text.grammars, form, ask)}")
    what, option = ("schema of the tools", "tools") if tools else ("JSON schema", "schema")
    grammar = "\n".join([f"start: thought ({' | '.join(bodies)})", *rules])
    return text.grammars.lark(grammar, what=what, option=option)


def _wanted(ask: Ask) -> tuple[Sequence[Tool], bool]:
    """Tools that may be called, and whether more than once."""
    if ask.tool_choice in ("auto", "none"):
        return (ask.tools if ask.tool_choice == "auto" else ()), ask.parallel_calls
    named = ask.tool_choice != "required"
    tools = [tool for tool in ask.tools if not named or tool.name == ask.tool_choice]
    if not tools:
        reason = "`tools` has no such tool" if named else "there are no `tools`"
        raise RequestError(f"`tool_choice` is `{ask.tool_choice}`: {reason}", option="tool_choice")
    return tools, ask.parallel_calls and not named


def _thought(grammars: GrammarCompiler, form: AnswerForm) -> list[str]:
    """Rules of what may come before: nothing, or reasoning to its end."""
    if form.thought is None:
        return ['thought: ""']
    begin, end = form.thought
    opened = "" if form.in_thought else grammars.literal(begin)
    rest = "thought_text /\\n{0,2}/"
    return [
        f"thought: {rest}" if form.in_thought else f"thought: ({opened} {rest})?",
        grammars.text_until("thought_text", end),
    ]


def _content(grammars: GrammarCompiler, form: AnswerForm, ask: Ask) -> str:
    assert ask.schema is not None
    return f"{grammars.literal(form.content)} {grammars.json_rule(ask.schema)}"
