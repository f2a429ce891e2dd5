"""`/v1/chat/completions`: OpenAI's conversations, to one `Ask` and back.

https://platform.openai.com/docs/api-reference/chat, with what other servers added: `top_k`,
`min_p`, `repetition_penalty`, `chat_template_kwargs`, `ignore_eos`, `reasoning_content`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from hotset.core.errors import RequestError
from hotset.server import wire
from hotset.server.answering import Answering
from hotset.server.answers import Answers
from hotset.server.ask import Ask, Part, Tool, Usage, Whole
from hotset.server.chat_messages import ChatMessage, to_template
from hotset.server.sse import DONE, event
from hotset.server.tokens import Spelling, content_logprobs


class Function(wire.Part):
    """A function that may be called. `strict` calls are what a forced call always is."""

    name: wire.ToolName
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(wire.Part):
    """A tool. `cache_control` changes nothing of an answer: prefixes are kept anyway."""

    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = None


class ChosenName(wire.Part):
    name: wire.ToolName


class ChosenTool(wire.Part):
    type: Literal["function"]
    function: ChosenName


class JsonSchema(wire.Part):
    """`strict` is what answers always are; `name` and `description` are for the reader."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(wire.Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_of(self) -> dict[str, Any] | None:
        """Of the answer; `None` leaves it free.

        Raises:
            RequestError: the schema is missing, or there is one that nothing asks for.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError(
                "`response_format.json_schema` goes with the type `json_schema`",
                option="response_format.json_schema",
            )
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class ChatBody(wire.Sampled):
    """A conversation. `user`, `metadata`, `safety_identifier`, `prompt_cache_key` and
    `prompt_cache_retention` change nothing of an answer; nothing is stored."""

    NEUTRAL: ClassVar = {
        "store": (False,),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        "verbosity": ("medium",),
    }

    messages: Annotated[wire.Entries[ChatMessage], Field(min_length=1)]
    max_tokens: wire.Count | None = None
    max_completion_tokens: wire.Count | None = None
    n: Annotated[int, Field(ge=1, le=wire.MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: wire.StreamOptions | None = None
    stop: (
        wire.StopText
        | Annotated[wire.Entries[wire.StopText], Field(max_length=wire.MAX_STOPS)]
        | None
    ) = None
    logprobs: bool = False
    top_logprobs: wire.TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: wire.Entries[ChatTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, str | bool | int | float] = Field(default_factory=dict)
    ignore_eos: bool = False
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None


def to_ask(body: ChatBody) -> Ask:
    """The request in our own words.

    Raises:
        RequestError: parameters that contradict each other.
    """
    if body.top_logprobs and not body.logprobs:
        raise RequestError("`top_logprobs` needs `logprobs`", option="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise RequestError("`stream_options` needs `stream`", option="stream_options")
    sampling = body.sampling()
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    effort = wire.effort(body.reasoning_effort, usual="medium")
    chosen = body.tool_choice
    return Ask(
        messages=to_template(body.messages),
        sampling=sampling,
        max_tokens=_max_tokens(body),
        stop=wire.stops(body.stop),
        num_choices=body.n,
        tools=tuple(_tool(tool.function) for tool in body.tools),
        tool_choice=chosen if isinstance(chosen, str) else chosen.function.name,
        schema=None if body.response_format is None else body.response_format.schema_of(),
        template={**body.chat_template_kwargs, **effort.get("template", {})},
        usual=effort.get("usual", {}),
        thinking=False if body.reasoning_effort == "none" else None,
        parallel_calls=body.parallel_tool_calls,
        ignore_eos=body.ignore_eos,
    )


def _max_tokens(body: ChatBody) -> int | None:
    given = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(given) > 1:
        raise RequestError(
            "`max_tokens` and `max_completion_tokens` are the same and differ",
            option="max_completion_tokens",
        )
    return given.pop() if given else None


def _tool(function: Function) -> Tool:
    parameters = function.parameters or {"type": "object", "properties": {}}
    return Tool(name=function.name, description=function.description, parameters=parameters)


class ChatAnswer:
    """Answers as chat completions, whole or in chunks.

    Args:
        model: the name to answer under.
        body: what was asked.
        spelling: of tokens, for logprobs.
    """

    def __init__(self, model: str, body: ChatBody, spelling: Spelling) -> None:
        self._body, self._spelling = body, spelling
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time())}
        self._model = model

    def whole(self, choices: list[Whole], usage: Usage) -> dict[str, Any]:
        """One JSON object with all choices."""
        return {
            **self._head,
            "object": "chat.completion",
            "model": self._model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_of(usage),
        }

    def _choice(self, index: int, choice: Whole) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.calls
            ]
        assert choice.finish is not None
        logprobs = content_logprobs(choice.tokens, self._spelling) if self._body.logprobs else None
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish.reason,
        }

    async def events(self, answers: Answers) -> AsyncIterator[str]:
        """A chunk for each part; before them one that names the role of each choice."""
        for index in range(self._body.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for part in answers.parts():
            delta = _delta(part)
            if delta or part.tokens:
                yield self._chunk(part.index, delta, part)
            if part.finish is not None:
                yield self._chunk(part.index, {}, finish=part.finish.reason)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event(
                {
                    **self._head,
                    "object": "chat.completion.chunk",
                    "model": self._model,
                    "choices": [],
                    "usage": usage_of(answers.usage),
                }
            )
        yield DONE

    def _chunk(
        self, index: int, delta: dict[str, Any], part: Part | None = None, finish: str | None = None
    ) -> str:
        logprobs = content_logprobs(part.tokens, self._spelling) if part and part.tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event(
            {
                **self._head,
                "object": "chat.completion.chunk",
                "model": self._model,
                "choices": [choice],
            }
        )


def _delta(part: Part) -> dict[str, Any]:
    if part.content:
        return {"content": part.content}
    if part.reasoning:
        return {"reasoning_content": part.reasoning}
    if part.tool is None:
        return {}
    call: dict[str, Any] = {"index": part.tool.number}
    function: dict[str, Any] = {"arguments": part.tool.arguments}
    if part.tool.name is not None:
        call |= {"id": part.tool.call_id, "type": "function"}
        function = {"name": part.tool.name, **function}
    return {"tool_calls": [{**call, "function": function}]}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Counts under OpenAI's names."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_tokens,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.num_prefix_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }


def routes(answering: Answering) -> APIRouter:
    """The endpoint."""
    router = APIRouter(tags=["OpenAI"], route_class=answering.bodies.route_class)

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        answering.check_model(body.model)
        answer = ChatAnswer(answering.name, body, answering.spelling)
        return await answering.respond(
            http, [to_ask(body)], stream=body.stream, whole=answer.whole, events=answer.events
        )

    return router
