"""`/v1/completions`: OpenAI's plain prompts, to one `Ask` each and back.

https://platform.openai.com/docs/api-reference/completions, with what other servers added: `top_k`,
`min_p`, `repetition_penalty`, `ignore_eos`, `response_format`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import Field

from hotset.core.errors import RequestError
from hotset.server import wire
from hotset.server.answering import Answering
from hotset.server.answers import Answers
from hotset.server.ask import Ask, TokenInfo, Usage, Whole
from hotset.server.chat import ResponseFormat, usage_of
from hotset.server.sse import DONE, event
from hotset.server.tokens import Spelling, plain_logprobs

# What OpenAI's API takes where nothing is said.
DEFAULT_MAX_TOKENS = 16

MAX_PROMPTS = 16

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[wire.Entries[TokenId], Field(min_length=1)]


class CompletionBody(wire.Sampled):
    """One prompt or several, each a text or token ids. `user` changes nothing of an answer."""

    NEUTRAL: ClassVar = {"echo": (False,), "suffix": ("",), "best_of": (1,)}

    prompt: (
        str
        | Ids
        | Annotated[wire.Entries[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[wire.Entries[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: wire.Count = DEFAULT_MAX_TOKENS
    n: Annotated[int, Field(ge=1, le=wire.MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: wire.StreamOptions | None = None
    stop: (
        wire.StopText
        | Annotated[wire.Entries[wire.StopText], Field(max_length=wire.MAX_STOPS)]
        | None
    ) = None
    logprobs: wire.TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool = False
    user: str | None = None


def to_asks(body: CompletionBody) -> list[Ask]:
    """One request for each prompt.

    Raises:
        RequestError: parameters that contradict each other.
    """
    if body.stream_options is not None and not body.stream:
        raise RequestError("`stream_options` needs `stream`", option="stream_options")
    sampling = body.sampling()
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
    return [
        Ask(
            prompt=prompt,
            sampling=sampling,
            max_tokens=body.max_tokens,
            stop=wire.stops(body.stop),
            num_choices=body.n,
            schema=None if body.response_format is None else body.response_format.schema_of(),
            ignore_eos=body.ignore_eos,
        )
        for prompt in _prompts(body.prompt)
    ]


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


class CompletionAnswer:
    """Answers as text completions, whole or in chunks.

    Args:
        model: the name to answer under.
        body: what was asked.
        spelling: of tokens, for logprobs.
    """

    def __init__(self, model: str, body: CompletionBody, spelling: Spelling) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._body, self._spelling = body, spelling
        self._spelled: dict[int, int] = {}

    def whole(self, choices: list[Whole], usage: Usage) -> dict[str, Any]:
        """One JSON object with all choices."""
        made = []
        for index, choice in enumerate(choices):
            assert choice.finish is not None
            made.append(self._choice(index, choice.content, choice.tokens, choice.finish.reason))
        return {**self._head, "choices": made, "usage": usage_of(usage)}

    def _choice(
        self, index: int, text: str, tokens: list[TokenInfo], finish: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None and tokens:
            start = self._spelled.get(index, 0)
            logprobs, end = plain_logprobs(tokens, self._spelling, start=start)
            self._spelled[index] = end
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    async def events(self, answers: Answers) -> AsyncIterator[str]:
        """A chunk for each part."""
        async for part in answers.parts():
            if not (part.content or part.tokens or part.finish):
                continue
            finish = None if part.finish is None else part.finish.reason
            choice = self._choice(part.index, part.content, list(part.tokens), finish)
            yield event({**self._head, "choices": [choice]})
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event({**self._head, "choices": [], "usage": usage_of(answers.usage)})
        yield DONE


def routes(answering: Answering) -> APIRouter:
    """The endpoint."""
    router = APIRouter(tags=["OpenAI"], route_class=answering.bodies.route_class)

    @router.post("/v1/completions", summary="Go on with a text")
    async def completions(body: CompletionBody, http: Request) -> Response:
        answering.check_model(body.model)
        answer = CompletionAnswer(answering.name, body, answering.spelling)
        return await answering.respond(
            http, to_asks(body), stream=body.stream, whole=answer.whole, events=answer.events
        )

    return router
