"""From one internal request to its answers: prompt, sampling, submission, and the HTTP response.

The same for every wire format. Knows no format's fields.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response

from hotset.core.errors import HotsetError, QueueFullError
from hotset.runtime.requests import Request
from hotset.server.answers import Answers, Choice
from hotset.server.ask import Ask, Usage, Whole
from hotset.server.bodies import Bodies
from hotset.server.errors import ANTHROPIC_PATHS, HttpError, Problem, problem_of
from hotset.server.forced import make_matcher
from hotset.server.prompts import Prompts
from hotset.server.served import Served
from hotset.server.speech import AnswerText, Plain, make_speech
from hotset.server.sse import COMMENT, EventStream, event
from hotset.server.status import unknown_model
from hotset.server.tokens import Spelling
from hotset.server.wire import Json

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A stream's status is not sent before its first token, so that what fails until then has a status
# of its own; but a client is not left without a word for longer than this.
_FIRST_WORD_SECONDS = 10.0
_PING = event({"type": "ping"}, name="ping")
# Nginx's word for a client that went away; nobody reads it.
_GONE = 499


class Answering:
    """Answers internal requests with one model.

    Args:
        served: the model.

    Attributes:
        name: the model's.
        context_tokens: longest prompt and answer together.
        spelling: of its tokens.
        bodies: reads those of requests.
    """

    def __init__(self, served: Served) -> None:
        self._served, self._loop = served, served.loop
        self._prompts = Prompts(served.text, context_tokens=served.context_tokens)
        self.name, self.context_tokens = served.names[0], served.context_tokens
        self.spelling: Spelling = served.text.token_bytes
        self.bodies = Bodies()

    def check_model(self, name: str | None) -> None:
        """Refuses any other model than this one; `None` passes.

        Raises:
            HttpError: 404.
        """
        if name is not None and name not in self._served.names:
            raise HttpError(unknown_model(name, self._served.names))

    async def prompt_ids(self, ask: Ask) -> list[int]:
        """Ids of a prompt, made beside the other requests: a long one takes a while.

        Raises:
            RequestError: what is wrong with it.
        """
        return await asyncio.to_thread(self._prompts.ids, ask)

    async def respond(
        self,
        http: HttpRequest,
        asks: Sequence[Ask],
        *,
        stream: bool,
        whole: Callable[[list[Whole], Usage], dict[str, Any]],
        events: Callable[[Answers], AsyncIterator[str]],
    ) -> Response:
        """Answers requests and puts the answers into one response.

        Args:
            http: whose client may go away; then the answers are cancelled.
            asks: their choices are numbered through.
            stream: by `events`, or in one piece by `whole`.

        Raises:
            HotsetError: what failed before the first byte.
        """
        path = http.url.path
        answers = await self._begin(asks, path)
        try:
            if not stream:
                choices = await _unless_gone(http, answers.whole())
                if choices is None:
                    return Response(status_code=_GONE)
                return Json(whole(choices, answers.usage))
            await _unless_gone(http, answers.first(_FIRST_WORD_SECONDS))
        except BaseException:
            answers.close()
            raise
        finally:
            if not stream:
                answers.close()
        return EventStream(
            _with_last_words(events(answers), path),
            on_end=answers.close,
            # Its clients count the time since the last event, and a comment is none.
            keep_alive=_PING if path.startswith(ANTHROPIC_PATHS) else COMMENT,
        )

    async def _begin(self, asks: Sequence[Ask], path: str) -> Answers:
        if self._loop.draining:
            raise HttpError(_ENDING)
        prepared = [await asyncio.to_thread(self._prepare, ask) for ask in asks]
        answers = Answers(self._loop, path)
        try:
            index = 0
            for ask, request in prepared:
                for number in range(ask.num_choices):
                    answers.add(
                        self._another(ask, request, number),
                        self._choice(ask, request, index),
                        counted=number == 0,
                    )
                    index += 1
        except QueueFullError as error:
            answers.close()
            wait = self._loop.retry_after_seconds
            problem = Problem(429, error.message, code="queue_full", retry_after_seconds=wait)
            raise HttpError(problem) from error
        except HotsetError as error:
            answers.close()
            if self._loop.draining:  # it has begun since
                raise HttpError(_ENDING) from error
            raise
        return answers

    def _prepare(self, ask: Ask) -> tuple[Ask, Request]:
        sampling = replace(self._served.text.sampling_defaults(), **ask.sampling)
        sampling.check_vocab(self._served.vocab)
        prompt_ids = self._prompts.ids(ask)
        request = Request(
            prompt_ids=prompt_ids,
            max_tokens=ask.max_tokens,
            sampling=sampling,
            stop_ids=frozenset() if ask.ignore_eos else self._served.stop_ids,
            matcher=make_matcher(self._served.text, ask, prompt_ids),
        )
        return ask, request

    def _another(self, ask: Ask, request: Request, number: int) -> Request:
        """The request of a choice: what it has to follow, and a seed gives each one of its own."""
        if number == 0:
            return request
        matcher = make_matcher(self._served.text, ask, request.prompt_ids)
        request = replace(request, matcher=matcher)
        seed = request.sampling.seed
        if seed is None:
            return request
        sampling = replace(request.sampling, seed=(seed + number) % 2**63)
        return replace(request, sampling=sampling)

    def _choice(self, ask: Ask, request: Request, index: int) -> Choice:
        speech = make_speech(self._served.text, ask, request.prompt_ids)
        return Choice(
            index,
            text=AnswerText(
                self._served.text, ask.stop, keep_special=not isinstance(speech, Plain)
            ),
            speech=speech,
            stop_ids=frozenset() if ask.ignore_eos else self._served.stop_ids,
            with_logprobs=ask.sampling.get("logprobs") is not None,
            parallel_calls=ask.parallel_calls,
        )


_ENDING = Problem(503, "the server is shutting down", code="shutting_down", retry_after_seconds=5)


async def _unless_gone(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work gives, `None` if the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for future in (task, gone):
            future.cancel()
            with suppress(asyncio.CancelledError, HotsetError):
                await future


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _with_last_words(events: AsyncIterator[str], path: str) -> AsyncIterator[str]:
    """The same events; an error, which the status can no longer say, is the last of them."""
    try:
        async for text in events:
            yield text
    except HotsetError as error:
        problem = problem_of(error)
    except Exception as error:
        logger.exception("a stream broke off")
        problem = problem_of(error)
    else:
        return
    yield event(problem.body(path), name="error" if path.startswith(ANTHROPIC_PATHS) else None)
