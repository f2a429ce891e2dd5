"""`/hotset/live`: what the page shows, as one small JSON object. Counts only, never a prompt.

Totals since the start, so that a reader makes rates of two answers and the server keeps nothing
for it. Made at most twice a second, however many watch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from fastapi import APIRouter, Response
from numpy.typing import NDArray

from hotset.runtime.requests import Counts
from hotset.server.metrics import Metrics
from hotset.server.state import Cells, State
from hotset.server.wire import dump

# How long an answer is good for, and over how long the heat picture looks back at least.
_FRESH_SECONDS = 0.45
_WINDOW_SECONDS = 0.9

RESIDENT, HIT, MISSED = 1, 2, 4
"""Bits of a cell of the picture: it has a slot now; within the window it was used with a slot; and
without one."""


class Live:
    """Makes the object.

    Args:
        name: of the model.
        counts: of the scheduler, now.
        health: status word and body, as `/health` gives them.
        clock: in seconds; the object's `clock`, by which a reader makes rates.
    """

    def __init__(
        self,
        name: str,
        *,
        counts: Callable[[], Counts],
        health: Callable[[], tuple[int, dict[str, Any]]],
        metrics: Metrics,
        state: State,
        clock: Callable[[], float],
    ) -> None:
        self._name, self._counts, self._health = name, counts, health
        self._metrics, self._state, self._clock = metrics, state, clock
        self._made_at, self._body = -_FRESH_SECONDS, b""
        self._earlier: deque[tuple[float, Cells]] = deque([(clock(), state.cells())])

    def body(self) -> bytes:
        """The object as JSON, at most `_FRESH_SECONDS` old."""
        now = self._clock()
        if not self._body or now - self._made_at >= _FRESH_SECONDS:
            self._made_at, self._body = now, dump(self._make(now))
        return self._body

    def _make(self, now: float) -> dict[str, Any]:
        counts, figures = self._counts(), self._state.figures()
        traffic = figures.traffic
        return {
            "clock": now,
            "model": self._name,
            "status": self._health()[1]["status"],
            "requests": {
                "running": counts.num_running,
                "waiting": counts.num_waiting,
                "finished": {reason.value: num for reason, num in counts.num_finished.items()},
            },
            "tokens": {
                "prompt": counts.num_prompt_tokens,
                "reused": counts.num_prefix_tokens,
                "generated": counts.num_generated_tokens,
            },
            "first_tokens": {
                "num": self._metrics.num_first_tokens,
                "seconds": self._metrics.first_token_seconds,
            },
            "kv_blocks": {"all": counts.num_blocks, "used": counts.num_blocks_used},
            "experts": {
                "steps": traffic.steps,
                "used": traffic.used,
                "hits": traffic.hits,
                "fills": traffic.fills,
                "link_bytes": traffic.link_bytes,
            },
            "decode": {"seconds": counts.decode_seconds, "light_seconds": figures.light_seconds},
            "gauges": {name: value for name, (_, value) in figures.gauges.items()},
            "heat": self._heat(now),
        }

    def _heat(self, now: float) -> dict[str, Any]:
        cells = self._state.cells()
        while len(self._earlier) > 1 and now - self._earlier[1][0] >= _WINDOW_SECONDS:
            self._earlier.popleft()
        since, earlier = self._earlier[0]
        self._earlier.append((now, cells))
        return {"seconds": now - since, "layers": picture(earlier, cells)}

    def routes(self) -> APIRouter:
        """The endpoint."""
        router = APIRouter(tags=["Server"])

        @router.get("/hotset/live", summary="What the page shows: counts, memory, heat")
        async def live() -> Response:
            headers = {"Cache-Control": "no-store"}
            return Response(self.body(), media_type="application/json", headers=headers)

        return router


def picture(earlier: Cells, now: Cells) -> list[str]:
    """One string for each layer, one digit for each expert: the sum of its bits."""
    missed_LE = now.missed_LE - earlier.missed_LE
    hit_LE = now.use_LE - earlier.use_LE - missed_LE
    bits_LE: NDArray[np.uint8] = (
        RESIDENT * now.resident_LE + HIT * (hit_LE > 0) + MISSED * (missed_LE > 0)
    ).astype(np.uint8)
    digits_LE = bits_LE + np.uint8(ord("0"))
    return [
        digits_LE[layer, :num_experts].tobytes().decode("ascii")
        for layer, num_experts in enumerate(now.num_experts_L)
    ]
