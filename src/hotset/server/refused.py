"""Endpoints that clients look for and a language model cannot serve: refused in words."""

from __future__ import annotations

from fastapi import APIRouter, Response

from hotset.server.answering import Answering
from hotset.server.errors import HttpError, Problem


def routes(answering: Answering) -> APIRouter:
    """The endpoints."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/embeddings", summary="Refused: there is no embedding model")
    async def embeddings() -> Response:
        message = f"`{answering.name}` generates text and has no embeddings; use an embedding model"
        raise HttpError(Problem(400, message, code="unsupported_endpoint"))

    return router
