"""Where bodies are read: small ones on the event loop, large ones beside it, one after the other.

A body of megabytes takes a part of a second to parse and to check, in which the loop would send no
token to anybody. Knows how a route hands its body on; nothing of what is in one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from hotset.server.errors import HttpError, problem_of_fields

# About a millisecond of work, which is what handing it to a thread may cost.
LARGE_BODY_BYTES = 64 * 1024


class Bodies:
    """Reads large bodies in a thread of its own, which bounds what they hold at once.

    Attributes:
        route_class: for routers whose bodies it reads.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
        self.route_class = _route_class(self)

    async def read(self, raw: bytes, model: type[BaseModel]) -> BaseModel:
        """A body, parsed and checked.

        Raises:
            json.JSONDecodeError, UnicodeDecodeError, RecursionError: it is no JSON.
            HttpError: it is not what the model wants.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, _read, raw, model)

    def close(self) -> None:
        """Ends the thread; what it reads is nobody's any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _read(raw: bytes, model: type[BaseModel]) -> BaseModel:
    value = json.loads(raw)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise HttpError(problem_of_fields(error.errors(include_url=False), value)) from error


def _route_class(bodies: Bodies) -> type[APIRoute]:
    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()
            if self.body_field is None:
                return handler
            model: Any = self.body_field.field_info.annotation
            assert isinstance(model, type) and issubclass(model, BaseModel)

            class BodyRequest(Request):
                """Its JSON is a model already where it is large; validation passes that on."""

                async def json(self) -> Any:
                    raw = await self.body()
                    if len(raw) <= LARGE_BODY_BYTES:
                        return await super().json()
                    return await bodies.read(raw, model)

            async def handle(request: Request) -> Response:
                return await handler(BodyRequest(request.scope, request.receive))

            return handle

    return BodyRoute
