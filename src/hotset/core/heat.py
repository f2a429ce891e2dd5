"""Layers x experts: how often each was used and had a slot. From a trace, or as a server tells it.

Knows shares only; draws nothing and fetches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.core.errors import ConfigError
from hotset.core.placement import Placement
from hotset.core.policy import HalfLife
from hotset.core.policy.base import top_experts
from hotset.core.simulator import Condition
from hotset.core.slot_pools import SlotPools
from hotset.core.trace import Trace


@dataclass(frozen=True)
class HeatMap:
    """One model's experts.

    Attributes:
        use_LE: [L, E] share of a layer's uses; NaN beyond a layer's experts.
        resident_LE: [L, E] share of the time with a slot, 0 or 1 of a moment; NaN likewise.
        title: what it is of.
    """

    use_LE: NDArray[np.float64]
    resident_LE: NDArray[np.float64]
    title: str

    def to_dict(self) -> dict[str, Any]:
        layers = [
            {"use": use[~np.isnan(use)].tolist(), "resident": kept[~np.isnan(use)].tolist()}
            for use, kept in zip(self.use_LE, self.resident_LE, strict=True)
        ]
        return {"title": self.title, "layers": layers}

    @classmethod
    def from_trace(cls, trace: Trace, *, slots: float, half_life: float) -> HeatMap:
        """Replays a trace under policy `half-life` and counts who has a slot after each token.

        Args:
            slots: share of each layer's experts that have a slot.
            half_life: steps.
        """
        condition = Condition(HalfLife.name, slots, half_life)
        slots_L = condition.slots_per_layer(trace.num_experts)
        pools = SlotPools.uniform(trace.num_experts, slots_L.tolist())
        policy = HalfLife(trace.num_experts, half_life=half_life)
        start = top_experts(np.zeros(policy.shape), policy.num_experts, slots_L)
        placement = Placement.from_residents(pools, start)
        wishes = policy.wishes(placement)
        kept_LE = np.zeros(policy.shape)
        for ids_TLK in trace:
            for ids_LK in ids_TLK:
                placement.apply(placement.match_step(ids_LK, wishes.victims_LV, wishes.admit_LE))
                policy.observe(ids_LK)
                policy.wishes(placement, out=wishes)
                kept_LE += placement.resident
        return cls._of(
            trace.total_counts(),
            kept_LE / trace.num_tokens,
            num_experts=policy.num_experts,
            title=f"{trace.info.model or 'trace'}: {trace.num_tokens:,} tokens, "
            f"{slots:.0%} of the experts with a slot, half-life {half_life:g}",
        )

    @classmethod
    def from_json(cls, data: Any, *, name: str) -> HeatMap:
        """Of an object `{"layers": [{"use": [...], "resident": [...]}, ...]}`.

        Raises:
            ConfigError: it is not one.
        """
        layers = data.get("layers") if isinstance(data, Mapping) else None
        if not isinstance(layers, list) or not layers:
            raise ConfigError(f"`{name}` holds no `layers`")
        rows = [cls._row(layer, name) for layer in layers]
        num_experts = np.array([len(use) for use, _ in rows])
        shape = (len(rows), int(num_experts.max()))
        use_LE, resident_LE = np.zeros(shape), np.zeros(shape)
        for index, (use, resident) in enumerate(rows):
            use_LE[index, : len(use)] = use
            resident_LE[index, : len(resident)] = resident
        steps = data.get("steps")
        title = name if steps is None else f"{name}: {steps} steps"
        return cls._of(use_LE, resident_LE, num_experts=num_experts, title=title)

    @staticmethod
    def _row(layer: Any, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        try:
            use = np.asarray(layer["use"], dtype=np.float64)
            resident = np.asarray(layer["resident"], dtype=np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"a layer of `{name}` lacks lists `use` and `resident`") from error
        if use.ndim != 1 or use.shape != resident.shape or len(use) == 0:
            raise ConfigError(f"`use` and `resident` of a layer of `{name}` are not equally long")
        return use, resident

    @classmethod
    def _of(
        cls,
        counts_LE: NDArray[Any],
        resident_LE: NDArray[np.float64],
        *,
        num_experts: NDArray[Any],
        title: str,
    ) -> HeatMap:
        beyond = np.arange(counts_LE.shape[1]) >= num_experts[:, None]
        use_LE = counts_LE / np.maximum(1, counts_LE.sum(axis=1, keepdims=True))
        return cls(np.where(beyond, np.nan, use_LE), np.where(beyond, np.nan, resident_LE), title)
