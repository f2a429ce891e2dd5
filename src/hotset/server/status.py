"""What a server says of itself: models, health, metrics, plan, heat. Reads; changes nothing."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response

from hotset.server.config import ServerConfig
from hotset.server.engine_loop import EngineLoop
from hotset.server.errors import HttpError, Problem
from hotset.server.metrics import CONTENT_TYPE, Metrics
from hotset.server.state import State
from hotset.server.wire import Json


class Status:
    """Answers of the pages that programs watch.

    Args:
        names: of the model; the first is its own, the others are aliases.
        context_tokens: longest prompt and answer together.
        loop: whose health it is.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        context_tokens: int,
        loop: EngineLoop,
        metrics: Metrics,
        state: State,
        config: ServerConfig,
    ) -> None:
        self._names, self._context_tokens = names, context_tokens
        self._loop, self._metrics, self._state, self._config = loop, metrics, state, config
        self._created = int(time.time())

    def model(self, name: str) -> dict[str, Any]:
        """One entry of the list of models."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "hotset",
            "root": self._names[0],
            "max_model_len": self._context_tokens,
        }

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body: 200 while steps end, 503 where the engine stalls, ends or has failed."""
        seconds = self._loop.seconds_without_progress
        if self._loop.error is not None:
            word = "failed"
        elif self._loop.draining:
            word = "draining"
        else:
            word = "stalled" if seconds > self._config.stall_seconds else "ok"
        body: dict[str, Any] = {
            "status": word,
            "requests": self._loop.num_open,
            "seconds_without_progress": round(seconds, 3),
        }
        if self._loop.error is not None:
            body["reason"] = self._loop.error.message
        return (200 if word == "ok" else 503), body

    def routes(self) -> APIRouter:
        """The endpoints."""
        router = APIRouter(tags=["Server"])

        @router.get("/v1/models", summary="The model, under each of its names")
        async def models() -> Response:
            data = [self.model(name) for name in self._names]
            return Json({"object": "list", "data": data})

        @router.get("/v1/models/{name:path}", summary="One of them")
        async def model(name: str) -> Response:
            if name not in self._names:
                raise HttpError(unknown_model(name, self._names))
            return Json(self.model(name))

        @router.get("/health", summary="Whether requests are being answered")
        async def health() -> Response:
            status, body = self.health()
            return Json(body, status_code=status)

        @router.get("/metrics", summary="Figures for Prometheus")
        async def metrics() -> Response:
            return Response(self._metrics.text(), media_type=CONTENT_TYPE)

        @router.get("/plan", summary="The memory plan, and what was measured")
        async def plan() -> Response:
            return Json(self._state.plan())

        @router.get("/hotset/heat", summary="Uses of each expert, and which have a slot")
        async def heat() -> Response:
            return Json(heat_of(self._state))

        return router


def heat_of(state: State) -> dict[str, Any]:
    """`layers`: for each MoE layer `use` and `missed`, uses of each expert since the start and
    those without a slot, and `resident`, 1 for each that has one now; `steps` so far."""
    cells = state.cells()
    rows = {"use": cells.use_LE, "missed": cells.missed_LE, "resident": cells.resident_LE}
    layers = [
        {name: row_LE[layer, :num_experts].astype(int).tolist() for name, row_LE in rows.items()}
        for layer, num_experts in enumerate(cells.num_experts_L)
    ]
    return {"steps": state.figures().traffic.steps, "layers": layers}


def unknown_model(name: str, names: tuple[str, ...]) -> Problem:
    """The refusal of a model that is not the one that is loaded."""
    known = " or ".join(f"`{known}`" for known in names)
    return Problem(404, f"`model` is `{name}`, this server has {known}", "model", "model_not_found")
