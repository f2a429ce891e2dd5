"""From messages or text to ids: tools and variables of the chat template.

A variable reaches a template only if the template reads it: what has no effect is refused by its
name, and nothing of the library's own arguments can be set from outside.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from jinja2 import Environment, TemplateError, meta

from hotset.core.errors import RequestError
from hotset.runtime.text import Text
from hotset.server.ask import Ask
from hotset.server.parsers.registry import reasons

# Set by the library or from other fields of a request.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
# Where templates let a client say whether to reason first (Qwen3 and GLM; DeepSeek; granite).
_THINKING = ("enable_thinking", "thinking")
# The library's own tag, which only marks what a model is trained on.
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")


class Prompts:
    """Makes the ids of prompts.

    Args:
        text: tokenizer and template.
    """

    def __init__(self, text: Text) -> None:
        self._text = text

    def ids(self, ask: Ask) -> list[int]:
        """Ids of a request's prompt.

        Raises:
            RequestError: no template, a template that refuses the messages, or variables and tools
                that it does not read.
        """
        if ask.messages is None:
            assert ask.prompt is not None
            return (
                self._text.encode(ask.prompt) if isinstance(ask.prompt, str) else list(ask.prompt)
            )
        variables = self._variables(ask)
        if ask.tools and ask.tool_choice != "none":
            variables["tools"] = [tool.to_template() for tool in ask.tools]
        return self._text.encode_chat(ask.messages, **variables)

    @cached_property
    def read(self) -> frozenset[str]:
        """Variables that the template reads."""
        return template_variables(self._text.chat_template)

    def _variables(self, ask: Ask) -> dict[str, Any]:
        given = dict(ask.template)
        for name in given:
            if name in _RESERVED or name not in self.read:
                known = ", ".join(f"`{v}`" for v in sorted(self.read & set(_KNOWN))) or "none"
                raise RequestError(
                    f"`{name}` is not supported by the chat template of this model",
                    hint=f"of the usual variables it reads {known}",
                    option=name,
                )
        if ask.tools and ask.tool_choice != "none" and "tools" not in self.read:
            raise RequestError("the chat template of this model knows no tools", option="tools")
        return given | self._thinking(ask.thinking)

    def _thinking(self, wanted: bool | None) -> dict[str, bool]:
        if wanted is None:
            return {}
        for name in _THINKING:
            if name in self.read:
                return {name: wanted}
        if wanted and not reasons(self._text.chat_template):
            raise RequestError(
                "the chat template of this model knows no thinking", option="thinking"
            )
        return {}  # it always reasons, or never does


_KNOWN = (*_THINKING, "reasoning_effort", "clear_thinking", "preserve_thinking")


def template_variables(template: str | None) -> frozenset[str]:
    """Names that a chat template reads from outside."""
    if template is None:
        return frozenset()
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_GENERATION.sub("", template))
    except TemplateError:  # what the library makes of it is said when it is used
        return frozenset()
    return frozenset(meta.find_undeclared_variables(parsed))
