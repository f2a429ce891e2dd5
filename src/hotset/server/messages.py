"""`/v1/messages`: Anthropic's conversations, to one `Ask` and back.

https://docs.anthropic.com/en/api/messages. Text, tools and thinking; no images, no documents, no
tools that run at the server.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from hotset.core.errors import RequestError
from hotset.server import wire
from hotset.server.answering import Answering
from hotset.server.answers import Answers
from hotset.server.ask import Ask, Finish, Part, Tool, Usage, Whole
from hotset.server.message_blocks import MessageParam, SystemText, to_template
from hotset.server.sse import event


class MessageTool(wire.Part):
    """A tool of the client. `cache_control` changes nothing of an answer: prefixes are kept
    anyway; nor do `defer_loading`, for every tool is in the prompt, and `eager_input_streaming`,
    for arguments always come as soon as they can."""

    name: wire.ToolName
    description: str = ""
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(wire.Part):
    type: Literal["auto", "any", "tool", "none"]
    name: wire.ToolName | None = None
    disable_parallel_tool_use: bool = False

    def chosen(self) -> str:
        """`auto`, `none`, `required` or a tool's name.

        Raises:
            RequestError: a name is missing, or not asked for.
        """
        if (self.type == "tool") != (self.name is not None):
            raise RequestError(
                "`tool_choice.name` goes with the type `tool`", option="tool_choice.name"
            )
        return self.name or {"any": "required"}.get(self.type, self.type)


class Thinking(wire.Part):
    """Whether to reason first, and in how many tokens."""

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: wire.Count | None = None

    def budget(self, max_tokens: int | None) -> int | None:
        """Most tokens of reasoning; `None` for no limit.

        Args:
            max_tokens: of the whole answer, where there will be one.

        Raises:
            RequestError: a budget of what is not switched on, or one that leaves no answer.
        """
        name, budget = "thinking.budget_tokens", self.budget_tokens
        if budget is not None and self.type != "enabled":
            raise RequestError(f"`{name}` goes with the type `enabled`", option=name)
        if budget is not None and max_tokens is not None and budget >= max_tokens:
            raise RequestError(f"`max_tokens` must be greater than `{name}`", option=name)
        return budget


class OutputFormat(wire.Part):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(wire.Part):
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(wire.Part):
    user_id: str | None = None


class PromptBody(wire.Body):
    """A conversation that is answered, or only counted."""

    NEUTRAL: ClassVar = {
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "mcp_servers": ([],),
        # What an earlier turn thought is handed to the template as it came.
        "context_management": (
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
    }

    messages: Annotated[wire.Entries[MessageParam], Field(min_length=1)]
    system: str | wire.Entries[SystemText] | None = None
    tools: wire.Entries[MessageTool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


class MessageBody(PromptBody):
    """A conversation. `metadata` and `cache_control` change nothing of an answer."""

    max_tokens: wire.Count
    stop_sequences: wire.Entries[wire.StopText] = Field(
        default_factory=list, max_length=wire.MAX_STOPS
    )
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: Metadata | None = None


def to_ask(body: PromptBody) -> Ask:
    """The request in our own words.

    Raises:
        RequestError: what contradicts itself.
    """
    config = body.output_config or OutputConfig()
    choice = body.tool_choice or ToolChoice(type="auto")
    thinking = body.thinking or Thinking(type="adaptive")
    most = body.max_tokens if isinstance(body, MessageBody) else None
    return Ask(
        messages=to_template(body.system, body.messages),
        tools=tuple(
            Tool(name=tool.name, description=tool.description, parameters=tool.input_schema)
            for tool in body.tools
        ),
        tool_choice=choice.chosen(),
        parallel_calls=not choice.disable_parallel_tool_use,
        schema=None if config.format is None else config.format.schema_,
        **wire.effort(config.effort, usual="high"),
        thinking={"enabled": True, "disabled": False}.get(thinking.type),
        most_thought=thinking.budget(most),
        **(_length_and_sampling(body) if isinstance(body, MessageBody) else {}),
    )


def _length_and_sampling(body: MessageBody) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k")
    return {
        "max_tokens": body.max_tokens,
        "stop": tuple(body.stop_sequences),
        "sampling": {n: getattr(body, n) for n in names if getattr(body, n) is not None},
    }


class MessageAnswer:
    """An answer as a message, whole or as events of its blocks.

    Args:
        model: the name to answer under.
    """

    def __init__(self, model: str) -> None:
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def whole(self, choices: list[Whole], usage: Usage) -> dict[str, Any]:
        """One JSON object."""
        (choice,) = choices
        assert choice.finish is not None
        return {
            **self._head,
            "content": _blocks(choice),
            **_stop(choice.finish),
            "usage": _usage(usage),
        }

    async def events(self, answers: Answers) -> AsyncIterator[str]:
        """Each block has a start, pieces, and a stop; only one is open at a time."""
        yield _event(
            "message_start",
            message={
                **self._head,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage(replace(answers.usage, num_tokens=0)),
            },
        )
        index, open_kind = -1, None
        async for part in answers.parts():
            piece = _piece(part)
            if piece is not None:
                kind, block, delta = piece
                if kind != open_kind:
                    if open_kind is not None:
                        yield _event("content_block_stop", index=index)
                    index, open_kind = index + 1, kind
                    yield _event("content_block_start", index=index, content_block=block)
                yield _event("content_block_delta", index=index, delta=delta)
            if part.finish is not None:
                if open_kind is not None:
                    yield _event("content_block_stop", index=index)
                yield _event("message_delta", delta=_stop(part.finish), usage=_usage(answers.usage))
        yield _event("message_stop")


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, name=kind)


def _piece(part: Part) -> tuple[object, dict[str, Any], dict[str, Any]] | None:
    """What tells a part's block from others, the block when it opens, and the piece of it."""
    if part.reasoning:
        block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
        return "thinking", block, {"type": "thinking_delta", "thinking": part.reasoning}
    if part.content:
        return "text", {"type": "text", "text": ""}, {"type": "text_delta", "text": part.content}
    if part.tool is None:
        return None
    block = {"type": "tool_use", "id": part.tool.call_id, "name": part.tool.name, "input": {}}
    delta = {"type": "input_json_delta", "partial_json": part.tool.arguments}
    return part.tool.number, block, delta


def _blocks(choice: Whole) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.content:
        blocks.append({"type": "text", "text": choice.content})
    for call in choice.calls:
        try:
            value = wire.json_object(call.arguments, name="input")
        except RequestError:  # cut off by max_tokens: half an object cannot be sent as one
            blocks.append({"type": "text", "text": call.arguments})
            continue
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": value})
    return blocks


def _stop(finish: Finish) -> dict[str, Any]:
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[finish.reason]
    if finish.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": finish.stop}


def _usage(usage: Usage) -> dict[str, Any]:
    """Under Anthropic's names: there the tokens that were reused are no input tokens."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_prefix_tokens,
        "cache_read_input_tokens": usage.num_prefix_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.num_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }


def routes(answering: Answering) -> APIRouter:
    """The endpoints."""
    router = APIRouter(tags=["Anthropic"], route_class=answering.bodies.route_class)

    @router.post("/v1/messages", summary="Answer a conversation")
    async def messages(body: MessageBody, http: Request) -> Response:
        answering.check_model(body.model)
        answer = MessageAnswer(answering.name)
        return await answering.respond(
            http, [to_ask(body)], stream=body.stream, whole=answer.whole, events=answer.events
        )

    @router.post("/v1/messages/count_tokens", summary="Count the tokens of a conversation")
    async def count_tokens(body: PromptBody) -> Response:
        answering.check_model(body.model)
        return wire.Json({"input_tokens": len(await answering.prompt_ids(to_ask(body)))})

    return router
