"""The application: every path, and what becomes of an error. Knows no engine, only its parts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import hotset
from hotset.core.errors import HotsetError
from hotset.server import chat, completions, messages, page, refused, responses, tokenize
from hotset.server.answering import Answering
from hotset.server.config import ServerConfig
from hotset.server.errors import (
    Problem,
    problem_of,
    problem_of_fields,
    problem_of_status,
    problem_of_type,
)
from hotset.server.guard import Guard
from hotset.server.live import Live
from hotset.server.served import Served
from hotset.server.status import Status
from hotset.server.wire import Json

logger = logging.getLogger(__name__)

_DESCRIPTION = "Answers under OpenAI's and Anthropic's names, and figures of the engine."


def create_app(
    served: Served,
    config: ServerConfig,
    *,
    on_death: Callable[[], None] = lambda: None,
) -> FastAPI:
    """An application that starts the engine's thread when it starts.

    Args:
        served: the model.
        config: whom to let in.
        on_death: called when an error has ended the engine and every open request was told.
    """

    answering = Answering(served)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        served.loop.start(on_death=on_death)
        yield
        answering.bodies.close()

    app = FastAPI(
        title="hotset",
        version=hotset.__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        # The pages of both would fetch scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        # Spans and records would hold what people wrote.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    for part in (chat, completions, responses, messages, tokenize, refused):
        app.include_router(part.routes(answering))
    for router in _figures(served, config):
        app.include_router(router)
    _explain_errors(app)
    app.add_middleware(Guard, config=config)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


def _figures(served: Served, config: ServerConfig) -> tuple[APIRouter, ...]:
    """What tells how the engine is: health and metrics, the live feed, the page that draws it."""
    status = Status(
        served.names,
        context_tokens=served.context_tokens,
        loop=served.loop,
        metrics=served.metrics,
        state=served.state,
        config=config,
    )
    live = Live(
        served.names[0],
        counts=served.loop.scheduler.counts,
        health=status.health,
        metrics=served.metrics,
        state=served.state,
        clock=served.loop.clock,
    )
    return status.routes(), live.routes(), page.routes()


def _explain_errors(app: FastAPI) -> None:
    def tell(problem: Problem, request: Request) -> Response:
        body = problem.body(request.url.path)
        return Json(body, status_code=problem.status, headers=problem.headers)

    @app.exception_handler(HotsetError)
    async def typed(request: Request, error: HotsetError) -> Response:
        return tell(problem_of(error), request)

    @app.exception_handler(RequestValidationError)
    async def fields(request: Request, error: RequestValidationError) -> Response:
        wrong = problem_of_type(request.headers.get("content-type"))
        return tell(wrong or problem_of_fields(error.errors(), error.body), request)

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        return tell(
            problem_of_status(error.status_code, str(error.detail), error.__cause__), request
        )

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return tell(problem_of(error), request)
