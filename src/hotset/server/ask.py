"""The one request that every wire format is translated into, and the parts of its answers.

Plain data. Knows nothing of HTTP, of JSON shapes, or of how an answer is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotset.core.request import TokenLogprobs

# A message as chat templates take it: `role`, `content`, and what else a role has.
Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may ask for.

    Attributes:
        name: of the function.
        description: for the model.
        parameters: JSON schema of its arguments.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})

    def to_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        function: dict[str, Any] = {"name": self.name, "parameters": dict(self.parameters)}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a client wants.

    Attributes:
        messages: a conversation; or
        prompt: plain text, or ids. Exactly one of the two.
        sampling: fields of `SamplingParams` that the client gave; the rest is the checkpoint's.
        max_tokens: most new tokens of a choice; `None` goes on to the end of the context.
        stop: strings that end an answer; they are not part of it.
        num_choices: answers to the same prompt.
        tools: what may be called.
        tool_choice: `auto`, `none`, `required`, or the name of one tool that must be called.
        schema: JSON schema of the answer; `None` leaves it free. `{"type": "object"}` is any
            object.
        template: further variables of the chat template.
        usual: variables that ask for what is usual, left out where the template does not read them.
        thinking: whether the model should reason before it answers; `None` leaves it to the
            template.
        most_thought: most tokens of reasoning; `None` for as many as there is room for.
        parallel_calls: whether an answer may have more than one call.
        ignore_eos: go on to `max_tokens` whatever is drawn (for measurements).
    """

    messages: Sequence[Message] | None = None
    prompt: str | Sequence[int] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    schema: Mapping[str, Any] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    most_thought: int | None = None
    parallel_calls: bool = True
    ignore_eos: bool = False


@dataclass(frozen=True)
class ToolPart:
    """A piece of a call.

    Attributes:
        number: of the call within its answer, from 0.
        call_id: its id.
        name: of the tool; set on the first piece of a call only.
        arguments: a piece of the JSON text of its arguments.
    """

    number: int
    call_id: str
    name: str | None
    arguments: str


@dataclass(frozen=True)
class TokenInfo:
    """A drawn token, for a client that asked for logprobs.

    Attributes:
        token_id: its id.
        logprobs: how likely it was, and the likeliest beside it.
    """

    token_id: int
    logprobs: TokenLogprobs


@dataclass(frozen=True)
class Finish:
    """How an answer ended.

    Attributes:
        reason: `stop`, `length` or `tool_calls`.
        stop: the string that ended it, where one did.
    """

    reason: str
    stop: str | None = None


@dataclass(frozen=True)
class Part:
    """What an answer goes on with. At most one of content, reasoning and tool is set.

    Attributes:
        index: of the choice.
        content, reasoning: text.
        tool: a piece of a call.
        tokens: those that this part took, where logprobs are asked for.
        finish: set on the last part of a choice.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tool: ToolPart | None = None
    tokens: tuple[TokenInfo, ...] = ()
    finish: Finish | None = None


@dataclass
class Call:
    """A whole call of a tool."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass
class Whole:
    """One choice, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, part: Part) -> None:
        """Takes in the next part."""
        self.content += part.content
        self.reasoning += part.reasoning
        self.tokens += part.tokens
        self.finish = part.finish or self.finish
        if part.tool is not None:
            if part.tool.number == len(self.calls):
                assert part.tool.name is not None, "a call begins with its name"
                self.calls.append(Call(part.tool.call_id, part.tool.name))
            self.calls[part.tool.number].arguments += part.tool.arguments


@dataclass(frozen=True)
class Usage:
    """Tokens of a request.

    Attributes:
        num_prompt_tokens: of its prompt, once for all choices.
        num_tokens: of all answers.
        num_prefix_tokens: of the prompt, those that were reused from earlier requests.
        num_reasoning_tokens: of the answers, those of reasoning, with the marks around it.
    """

    num_prompt_tokens: int
    num_tokens: int
    num_prefix_tokens: int = 0
    num_reasoning_tokens: int = 0

    @property
    def total(self) -> int:
        return self.num_prompt_tokens + self.num_tokens
