"""Speed of light: the time that bytes need at the best measured rates of a machine.

    decode step = resident weights / HBM + KV cache / HBM
                  + sum over MoE layers of max(missed bytes / link, hit bytes / HBM)

Resident weights and experts of a layer wait for each other, so their times add up; hits and
misses of a layer are read at the same time, by different programs of one kernel. Launches, norms,
softmax, routers and sampling are not in it: they are what a measurement may be above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotset.core.geometry import ModelGeometry


@dataclass(frozen=True)
class Rates:
    """Best measured rates, in gigabytes (1e9 bytes) per second.

    Attributes:
        link_gbps: kernels reading page-locked host memory in place.
        copy_gbps: host to device copies of long runs by the copy engine.
        hbm_gbps: device memory, read only.
    """

    link_gbps: float
    copy_gbps: float
    hbm_gbps: float


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of one decode step at the speed of light, by term.

    Attributes:
        resident_ms: weights that stay in the module tree.
        kv_ms: the cache of all rows.
        experts_ms: for each layer the longer of link and HBM time, summed.
    """

    resident_ms: float
    kv_ms: float
    experts_ms: float

    @property
    def total_ms(self) -> float:
        return self.resident_ms + self.kv_ms + self.experts_ms


def experts_ms(
    geometry: ModelGeometry, rates: Rates, hits: Sequence[float], misses: Sequence[float]
) -> float:
    """Expert time of one step.

    Args:
        hits, misses: distinct experts of each MoE layer that a step uses with and without a slot;
            means over steps are fine for layers in which the link is the longer throughout.
    """
    total = 0.0
    for layer, num_hits, num_misses in zip(geometry.layers, hits, misses, strict=True):
        record_bytes = layer.expert.record_bytes
        link = num_misses * record_bytes / rates.link_gbps
        hbm = num_hits * record_bytes / rates.hbm_gbps
        total += max(link, hbm) / 1e6
    return total


def decode_step(
    geometry: ModelGeometry,
    rates: Rates,
    *,
    hits: Sequence[float],
    misses: Sequence[float],
    context_tokens: int,
) -> StepCost:
    """One decode step; see `experts_ms` for `hits` and `misses`.

    Args:
        context_tokens: tokens in the caches of all rows together.
    """
    kv_bytes = geometry.kv_fixed_bytes + geometry.kv_bytes_per_token * context_tokens
    return StepCost(
        resident_ms=geometry.resident_read_bytes / rates.hbm_gbps / 1e6,
        kv_ms=kv_bytes / rates.hbm_gbps / 1e6,
        experts_ms=experts_ms(geometry, rates, hits, misses),
    )
