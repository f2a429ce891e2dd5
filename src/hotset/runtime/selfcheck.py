"""Compares what was planned and predicted with what is: memory line by line, and speed.

Measures by asking the allocations for their sizes and the meter for its rates; changes nothing. A
line that is more than a tenth off is a warning: the plan or the model of the machine is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hotset.core.costmodel import predict_step
from hotset.core.units import format_bytes
from hotset.runtime.engine import Engine
from hotset.runtime.known_rates import described
from hotset.runtime.planning import speed_model

TOLERANCE = 0.10
"""Share of the planned figure that a measured one may be off."""

LEAST_TOKENS = 100
"""Decoded before their speed is judged: the first steps warm caches and fill slots."""

# Below this a line is rounding, and a tenth of it says nothing.
LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class Check:
    """One figure, planned and measured.

    Attributes:
        name: a line of the plan, or `decode step`.
        unit: `bytes` or `ms`.
        is_limit: the measured figure may be below the planned one, which is the most.
    """

    name: str
    unit: str
    planned: float
    measured: float
    is_limit: bool = False

    @property
    def off(self) -> float:
        """(measured - planned) / planned; what is below a limit is not off."""
        if self.is_limit and self.measured <= self.planned:
            return 0.0
        return (self.measured - self.planned) / self.planned if self.planned else 0.0

    @property
    def is_right(self) -> bool:
        """Within `TOLERANCE`, or too little memory to matter."""
        if self.unit == "bytes" and abs(self.measured - self.planned) < LEAST_BYTES:
            return True
        return abs(self.off) <= TOLERANCE

    def __str__(self) -> str:
        planned, measured = (
            format_bytes(value) if self.unit == "bytes" else f"{value:.2f} {self.unit}"
            for value in (self.planned, self.measured)
        )
        return f"{self.name}: planned {planned}, measured {measured} ({self.off:+.1%})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "planned": self.planned,
            "measured": self.measured,
            "off": self.off,
            "ok": self.is_right,
        }


def check_memory(engine: Engine, *, device_peak_bytes: int) -> list[Check]:
    """The lines of the plan that are allocations of their own, and the peak of the device.

    Args:
        device_peak_bytes: most that torch's allocator held, 0 on a CPU.
    """
    plan, store = engine.plan, engine.store
    resident = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*engine.model.parameters(), *engine.model.buffers())
    }
    checks = [
        Check("resident weights", "bytes", plan.device["resident weights"], sum(resident.values())),
        Check("slots", "bytes", plan.device["slots"], store.slots.nbytes),
        Check("staging ring", "bytes", plan.device["staging ring"], store.ring.nbytes),
        Check("expert arena", "bytes", plan.host["expert arena"], store.arena.nbytes),
    ]
    if engine.decoding is not None:
        planned = sum(line.num_bytes for line in plan.device.lines if line.name.startswith("KV "))
        pool = engine.decoding.pool.nbytes
        checks.append(Check("KV cache", "bytes", planned, pool, is_limit=True))
    if device_peak_bytes:
        # The allocator sees neither the CUDA context nor what the plan leaves free.
        most = plan.device.total_bytes - plan.device["CUDA context"]
        checks.append(Check("device peak", "bytes", most, device_peak_bytes, is_limit=True))
    return checks


def check_speed(
    engine: Engine, *, num_tokens: int, tokens_per_second: float, hit_rate: float
) -> Iterator[Check]:
    """The decode step against the prediction at the hit rate that was seen; none without rates, or
    before `LEAST_TOKENS` tokens.

    Args:
        num_tokens: decoded by one row, after a prompt of which nothing is known: the cache is
            counted at the middle of them.
        hit_rate: of these tokens.
    """
    known = described(engine.machine)
    if known is None or num_tokens < LEAST_TOKENS or tokens_per_second <= 0:
        return
    layers = engine.geometry.layers
    expected = predict_step(
        engine.geometry,
        speed_model(engine.geometry, known).rates,
        hit_rates=[hit_rate] * len(layers),
        used=[float(layer.top_k) for layer in layers],
        context_tokens=num_tokens // 2,
    )
    yield Check("decode step", "ms", expected.total_ms, 1e3 / tokens_per_second)
