"""`/tokenize`: the ids that a prompt or a conversation becomes, special tokens included."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from hotset.core.errors import RequestError
from hotset.server import wire
from hotset.server.answering import Answering
from hotset.server.ask import Ask
from hotset.server.chat_messages import ChatMessage, to_template


class TokenizeBody(wire.Body):
    """Exactly one of `prompt` and `messages`; the model may be left out."""

    model: wire.Name | None = None  # type: ignore[assignment]
    prompt: str | None = None
    messages: Annotated[wire.Entries[ChatMessage], Field(min_length=1)] | None = None


def to_ask(body: TokenizeBody) -> Ask:
    """The request in our own words.

    Raises:
        RequestError: both, or neither.
    """
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either `prompt` or `messages`", option="prompt")
    if body.messages is not None:
        return Ask(messages=to_template(body.messages))
    return Ask(prompt=body.prompt)


def routes(answering: Answering) -> APIRouter:
    """The endpoint."""
    router = APIRouter(tags=["Server"], route_class=answering.bodies.route_class)

    @router.post("/tokenize", summary="Count and list the tokens of a prompt")
    async def tokenize(body: TokenizeBody) -> Response:
        answering.check_model(body.model)
        ids = await answering.prompt_ids(to_ask(body))
        context = answering.context_tokens
        return wire.Json({"count": len(ids), "max_model_len": context, "tokens": ids})

    return router
