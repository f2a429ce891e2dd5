"""What a running engine can be asked: figures, plan, and who owns the slots. Changes nothing.

Read from the asyncio thread while the engine's thread goes on: each array is copied as a whole,
so that a picture may be a step old, and no lock holds a step back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hotset.core.machine import LINK_FIGURES, pcie_gbps
from hotset.core.slot_pools import BoolArray, IntArray
from hotset.runtime.engine import Engine
from hotset.runtime.heat import Heat
from hotset.runtime.known_rates import described
from hotset.runtime.light import StepLight
from hotset.runtime.link import read_link
from hotset.runtime.memory import measure
from hotset.runtime.routing import Traffic


@dataclass(frozen=True)
class Figures:
    """Numbers of an engine at one moment.

    Attributes:
        traffic: experts used, hits, fills and link bytes since the start.
        gauges: name -> (what it is, value).
        light_seconds: what decode steps would have taken at the speed of light; `None` where the
            machine's rates are not known.
    """

    traffic: Traffic
    gauges: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    light_seconds: float | None = None


@dataclass(frozen=True, eq=False)
class Cells:
    """Layers x experts at one moment. What lies beyond a layer's experts is 0.

    Attributes:
        num_experts_L: of each MoE layer.
        use_LE: uses since the start, once for each token.
        missed_LE: those of them that found no slot.
        resident_LE: who has a slot now.
    """

    num_experts_L: IntArray
    use_LE: IntArray
    missed_LE: IntArray
    resident_LE: BoolArray


class State(Protocol):
    """What the pages and metrics show."""

    def figures(self) -> Figures:
        """As of now."""

    def plan(self) -> dict[str, Any]:
        """The memory plan as JSON, with what was measured beside it."""

    def cells(self) -> Cells:
        """Uses of each expert, and which have a slot."""


class EngineState:
    """Of a loaded engine, whose steps it watches from now on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._heat = Heat(engine.store.placement)
        self._link_limit_gbps = _link_limit_gbps(engine)
        self._light = _step_light(engine)
        with engine.steps.exclusive():
            engine.steps.watchers.append(self._heat)
            engine.steps.watchers += [self._light] if self._light else []

    def figures(self) -> Figures:
        plan, used = self._engine.plan, measure(self._engine.device)
        traffic = self._engine.traffic
        gauges = {
            "slots": ("Slots of the plan.", plan.num_slots),
            "experts": ("Experts of all layers.", self._engine.geometry.num_records),
            "hit_rate": ("Share of used experts that had a slot.", traffic.hit_rate),
            "device_planned_bytes": ("Of the plan.", plan.device.total_bytes),
            "device_peak_bytes": ("Most held at once.", used.device_peak_bytes),
            "host_planned_bytes": ("Of the plan.", plan.host.total_bytes),
            "host_peak_bytes": ("Peak resident set.", used.host_peak_bytes),
        }
        if self._link_limit_gbps is not None:
            gauges["link_limit_gbps"] = ("What the link can carry.", self._link_limit_gbps)
        if self._engine.drift is not None:
            drift = self._engine.drift.report()
            gauges["profile_hit_rate"] = ("Of the profile's hot set on this text.", drift.seen)
            gauges["profile_hit_rate_expected"] = ("Of it on its own text.", drift.expected)
            gauges["profile_hit_rate_blind"] = ("Of experts chosen blindly.", drift.blind)
        return Figures(traffic, gauges, self._light.seconds if self._light else None)

    def plan(self) -> dict[str, Any]:
        used = measure(self._engine.device)
        measured = {
            "device_peak_bytes": used.device_peak_bytes,
            "host_peak_bytes": used.host_peak_bytes,
            "host_anonymous_bytes": used.host_anonymous_bytes,
        }
        return {**self._engine.plan.to_dict(), "measured": measured}

    def cells(self) -> Cells:
        heat = self._heat
        return Cells(
            np.array([layer.num_experts for layer in self._engine.geometry.layers]),
            heat.use_LE.copy(),
            heat.missed_LE.copy(),
            heat.residents(),
        )


def _step_light(engine: Engine) -> StepLight | None:
    """By what was measured on such a machine; `None` where nothing was."""
    known = described(engine.machine)
    if known is None:
        return None
    record_bytes = max(layer.expert.record_bytes for layer in engine.geometry.layers)
    rates = known.rates(record_bytes=record_bytes)
    return StepLight(engine.geometry, rates, engine.store.placement)


def _link_limit_gbps(engine: Engine) -> float | None:
    """What the link can carry: the best rate measured on such a machine, or else what its lanes
    promise; `None` on a CPU and where the kernel does not say."""
    if engine.device.type != "cuda":
        return None
    known = described(engine.machine)
    figures = [known.figure(kind) for kind in LINK_FIGURES] if known is not None else []
    if rates := [figure.value for figure in figures if figure is not None]:
        return max(rates)
    link = read_link()
    return None if link is None else pcie_gbps(link.max_generation, link.max_width)
