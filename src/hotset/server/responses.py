"""`/v1/responses`: OpenAI's responses, to one `Ask` and back. Stateless: nothing is stored.

https://platform.openai.com/docs/api-reference/responses. Text, reasoning and functions; none of the
tools that run at the server. The events of a stream are `response_events`.
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
from hotset.server.ask import Ask, Finish, Usage, Whole
from hotset.server.response_events import ItemEvents
from hotset.server.response_items import InputItem, Items, to_template
from hotset.server.response_tools import ResponseTool, names_of, to_tools


class ChosenFunction(wire.Part):
    type: Literal["function"]
    name: wire.ToolName


class Reasoning(wire.Part):
    """How much to reason. There are no summaries, and `auto` is as much of one as there is."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class TextFormat(wire.Part):
    """`strict` is what answers always are; `name` and `description` are for the reader."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(wire.Part):
    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] | None = None


class ResponseBody(wire.Body):
    """A text, or the items of a conversation. `user`, `metadata`, `client_metadata`,
    `safety_identifier`, `prompt_cache_key` and `prompt_cache_retention` change nothing of an
    answer."""

    NEUTRAL: ClassVar = {
        "store": (False,),
        "background": (False,),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "stream_options": ({}, {"include_obfuscation": False}),
        # Reasoning is in its item as it is, to be sent back with it.
        "include": ([], ["reasoning.encrypted_content"]),
    }

    input: str | Annotated[wire.Entries[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: wire.Count | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: wire.Entries[ResponseTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: TextConfig = TextConfig()
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None


def to_ask(body: ResponseBody) -> Ask:
    """The request in our own words.

    Raises:
        RequestError: what contradicts itself.
    """
    effort = None if body.reasoning is None else body.reasoning.effort
    chosen = body.tool_choice
    return Ask(
        messages=to_template(body.instructions, body.input),
        sampling={
            name: getattr(body, name)
            for name in ("temperature", "top_p")
            if getattr(body, name) is not None
        },
        max_tokens=body.max_output_tokens,
        tools=to_tools(body.tools),
        tool_choice=chosen if isinstance(chosen, str) else chosen.name,
        parallel_calls=body.parallel_tool_calls,
        schema=_schema(body.text.format),
        **wire.effort(effort, usual="medium"),
        thinking=False if effort == "none" else None,
    )


def _schema(form: TextFormat) -> dict[str, Any] | None:
    if (form.type == "json_schema") != (form.schema_ is not None):
        raise RequestError(
            "`text.format.schema` goes with the type `json_schema`", option="text.format.schema"
        )
    return {"type": "object"} if form.type == "json_object" else form.schema_


class ResponseAnswer:
    """An answer as a response, whole or as events.

    Args:
        model: the name to answer under.
        body: what was asked; most of it is in the answer again, as this API wants it.
    """

    def __init__(self, model: str, body: ResponseBody) -> None:
        echoed = body.model_dump(
            by_alias=True,
            include={
                *("instructions", "max_output_tokens", "temperature", "top_p", "tools", "metadata"),
                *("tool_choice", "parallel_tool_calls", "reasoning", "text", "user"),
                *("safety_identifier", "prompt_cache_key"),
            },
        )
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "error": None,
            "previous_response_id": None,
            "store": False,
            "service_tier": "default",
            "truncation": "disabled",
            **echoed,
        }
        self._names = names_of(body.tools)

    def whole(self, choices: list[Whole], usage: Usage) -> dict[str, Any]:
        """One JSON object."""
        (choice,) = choices
        assert choice.finish is not None
        return self._ended(Items.of(choice, self._names), choice.finish, usage)

    def _ended(self, output: list[dict[str, Any]], finish: Finish, usage: Usage) -> dict[str, Any]:
        cut = finish.reason == "length"
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.num_prefix_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.num_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
                "total_tokens": usage.total,
            },
        }

    async def events(self, answers: Answers) -> AsyncIterator[str]:
        """The response when it begins, its items as they grow, and the response at its end."""
        items = ItemEvents(self._names)
        begun = {
            **self._head,
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        yield items.event("response.created", response=begun)
        yield items.event("response.in_progress", response=begun)
        async for part in answers.parts():
            for text in items.of(part):
                yield text
            if part.finish is not None:
                cut = part.finish.reason == "length"
                for text in items.end("incomplete" if cut else "completed"):
                    yield text
                ended = self._ended(items.output, part.finish, answers.usage)
                yield items.event(
                    "response.incomplete" if cut else "response.completed", response=ended
                )


def routes(answering: Answering) -> APIRouter:
    """The endpoint."""
    router = APIRouter(tags=["OpenAI"], route_class=answering.bodies.route_class)

    @router.post("/v1/responses", summary="Answer a conversation, as items")
    async def responses(body: ResponseBody, http: Request) -> Response:
        answering.check_model(body.model)
        answer = ResponseAnswer(answering.name, body)
        return await answering.respond(
            http, [to_ask(body)], stream=body.stream, whole=answer.whole, events=answer.events
        )

    return router
