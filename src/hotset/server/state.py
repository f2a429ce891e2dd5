"""What a running engine can be asked: figures, plan, and who owns the slots. Changes nothing.

Read from the asyncio thread while the engine's thread goes on: each array is copied as a whole,
so that a picture may be a step old, and no lock holds a step back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hotset.runtime.engine import Engine
from hotset.runtime.heat import Heat
from hotset.runtime.memory import measure
from hotset.runtime.routing import Traffic


@dataclass(frozen=True)
class Figures:
    """Numbers of an engine at one moment.

    Attributes:
        traffic: experts used, hits, fills and link bytes since the start.
        gauges: name -> (what it is, value).
    """

    traffic: Traffic
    gauges: Mapping[str, tuple[str, float]] = field(default_factory=dict)


class State(Protocol):
    """What the pages and metrics show."""

    def figures(self) -> Figures:
        """As of now."""

    def plan(self) -> dict[str, Any]:
        """The memory plan as JSON, with what was measured beside it."""

    def heat(self) -> dict[str, Any]:
        """`layers`: for each MoE layer `use` and `missed`, uses of each expert since the start
        and those without a slot, and `resident`, 1 for each that has one now; `steps` so far."""


class EngineState:
    """Of a loaded engine, whose steps it watches from now on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._heat = Heat(engine.store.placement)
        with engine.steps.exclusive():
            engine.steps.watchers.append(self._heat)

    def figures(self) -> Figures:
        plan, used = self._engine.plan, measure(self._engine.device)
        traffic = self._engine.traffic
        return Figures(
            traffic,
            {
                "slots": ("Slots of the plan.", plan.num_slots),
                "experts": ("Experts of all layers.", self._engine.geometry.num_records),
                "hit_rate": ("Share of used experts that had a slot.", traffic.hit_rate),
                "device_planned_bytes": ("Of the plan.", plan.device.total_bytes),
                "device_peak_bytes": ("Most held at once.", used.device_peak_bytes),
                "host_planned_bytes": ("Of the plan.", plan.host.total_bytes),
                "host_peak_bytes": ("Peak resident set.", used.host_peak_bytes),
            },
        )

    def plan(self) -> dict[str, Any]:
        used = measure(self._engine.device)
        measured = {
            "device_peak_bytes": used.device_peak_bytes,
            "host_peak_bytes": used.host_peak_bytes,
            "host_anonymous_bytes": used.host_anonymous_bytes,
        }
        return {**self._engine.plan.to_dict(), "measured": measured}

    def heat(self) -> dict[str, Any]:
        heat = self._heat
        rows_LE = {
            "use": heat.use_LE.copy(),
            "missed": heat.missed_LE.copy(),
            "resident": heat.residents().astype(int),
        }
        layers = [
            {name: rows[index, : layer.num_experts].tolist() for name, rows in rows_LE.items()}
            for index, layer in enumerate(self._engine.geometry.layers)
        ]
        return {"steps": self._engine.traffic.steps, "layers": layers}
