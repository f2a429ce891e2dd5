"""From messages or text to ids: tools and variables of the chat template.

A variable reaches a template only if the template reads it: what has no effect is refused by its
name, and nothing of the library's own arguments can be set from outside.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jinja2 import Environment, TemplateError, meta

from hotset.core.errors import ContextLengthError, RequestError
from hotset.runtime.text import Text
from hotset.server import earlier_thoughts
from hotset.server.ask import Ask, Message
from hotset.server.earlier_calls import wants_text, with_text
from hotset.server.earlier_thoughts import reads_other_name, renamed
from hotset.server.parsers.registry import reasons
from hotset.server.system_turns import PROBE, placed, shows_all

# Set by the library or from other fields of a request.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
# Where templates let a client say whether to reason first (Qwen3 and GLM; DeepSeek; granite).
_THINKING = ("enable_thinking", "thinking")
# The library's own tag, which only marks what a model is trained on.
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")

# Text with more letters than this for each token of the context hardly fits: it is counted slice
# by slice first, for the tokenizer takes a microsecond and 300 bytes a letter for the whole.
_LETTERS_PER_TOKEN = 8
_SLICE_LETTERS = 2**16


class Prompts:
    """Makes the ids of prompts.

    Args:
        text: tokenizer and template.
        context_tokens: the longest prompt.
    """

    def __init__(self, text: Text, *, context_tokens: int) -> None:
        self._text, self._context_tokens = text, context_tokens

    def ids(self, ask: Ask) -> list[int]:
        """Ids of a request's prompt.

        Raises:
            RequestError: no template, a template that refuses the messages, or variables and tools
                that it does not read.
            ContextLengthError: it has more than twice as many as the context.
        """
        if ask.messages is None:
            assert ask.prompt is not None
            if not isinstance(ask.prompt, str):
                return list(ask.prompt)
            self._check_size([ask.prompt], ask.max_tokens)
            return self._text.encode(ask.prompt)
        self._check_size([message["content"] for message in ask.messages], ask.max_tokens)
        variables = self._variables(ask)
        if ask.tools and ask.tool_choice != "none":
            variables["tools"] = [tool.to_template() for tool in ask.tools]
        return self._text.encode_chat(self._as_read(ask.messages), **variables)

    def _as_read(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages in the form that the template reads."""
        messages = placed(messages, anywhere=lambda: self._takes_system_anywhere)
        if reads_other_name(self._text.chat_template):
            messages = renamed(messages, beside_content=lambda: self._takes_thoughts_with_content)
        if any(message.get("tool_calls") for message in messages) and self._wants_text_arguments:
            messages = with_text(messages)
        return messages

    def _check_size(self, texts: Sequence[str], max_tokens: int | None) -> None:
        """Refuses what is far too long for the context, after as much work as one that is not.

        A slice has a token more than its part of the whole, or two, so twice the context of them is
        more than the context.
        """
        num_letters = sum(map(len, texts))
        if num_letters <= _LETTERS_PER_TOKEN * self._context_tokens + _SLICE_LETTERS:
            return
        counted = num_tokens = 0
        for text in texts:
            for start in range(0, len(text), _SLICE_LETTERS):
                part = text[start : start + _SLICE_LETTERS]
                num_tokens += len(self._text.encode_part(part))
                counted += len(part)
                if num_tokens > 2 * self._context_tokens:
                    num_prompt = num_tokens * num_letters // counted
                    raise ContextLengthError(
                        f"about {num_prompt} prompt tokens do not fit the context of "
                        f"{self._context_tokens}",
                        hint="shorten the prompt, or load with a larger `--context`",
                        num_prompt=num_prompt,
                        num_new=max_tokens,
                        context_tokens=self._context_tokens,
                    )

    @cached_property
    def _takes_system_anywhere(self) -> bool:
        """Whether the template prints system messages that do not come first."""
        rendered = self._rendered(PROBE)
        return rendered is not None and shows_all(rendered)

    @cached_property
    def _takes_thoughts_with_content(self) -> bool:
        """Whether a turn that calls may have both."""
        return self._rendered(earlier_thoughts.PROBE) is not None

    @cached_property
    def _wants_text_arguments(self) -> bool:
        """Whether the template takes arguments of earlier calls as JSON text only."""
        return wants_text(self._rendered)

    def _rendered(self, messages: Sequence[Message]) -> str | None:
        """What the template makes of messages; `None` where it refuses them."""
        try:
            return self._text.decode(self._text.encode_chat(messages))
        except RequestError:
            return None

    @cached_property
    def read(self) -> frozenset[str]:
        """Variables that the template reads."""
        return template_variables(self._text.chat_template)

    def _variables(self, ask: Ask) -> dict[str, Any]:
        usual = {name: value for name, value in ask.usual.items() if name in self.read}
        given = {**ask.template, **usual}
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
