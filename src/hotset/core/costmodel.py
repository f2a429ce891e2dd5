"""What a decode step and a load take, from the rates of a machine and a model's geometry.

    decode step = resident weights / HBM + KV cache / HBM
                  + sum over MoE layers of max(missed bytes / link, hit bytes / (share * HBM))
                  + decoder layers * (layer time + further rows * row time)
                  + MoE layers * experts' time

Resident weights and experts of a layer wait for each other, so their times add up; hits and misses
of a layer are read at the same time, by different programs of one kernel. Without the layer time
(launches, latency, norms, softmax, routers) and the experts' (match, launches, sums) a step is the
speed of light: what a measurement can come near to. With them, it is a prediction. The share is 1
at the speed of light; in a prediction it is what the records' format reaches (`format_rates`).
Prompts are in `prompt_cost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from hotset.core.format_rates import slot_read_bytes
from hotset.core.geometry import ModelGeometry, MoELayer


@dataclass(frozen=True)
class Rates:
    """Best measured rates, in gigabytes (1e9 bytes) per second. `None` where nobody knows.

    Attributes:
        link_gbps: kernels reading page-locked host memory in place.
        copy_gbps: host to device copies of long runs by the copy engine.
        hbm_gbps: device memory, read only.
        gemm_tflops: matrix products in the model's dtype, 1e12 operations per second.
        expert_tflops: those of many experts in one launch, rows that fill up a kernel's block
            included; `None` for as fast as any.
        attention_tflops: scores and sums of tokens among themselves; `None` for as fast as any.
        attention_past_tflops: those with tokens of earlier chunks; `None` for as fast.
        cpu_gbps: host memory read by all cores.
        disk_gbps: files read in sequence.
        layer_us: what a decoder layer of a decode step takes beyond its bytes, without experts,
            microseconds.
        experts_us: what the experts of a layer take beyond theirs, microseconds.
        row_us: what each further row of a step adds to `layer_us`, microseconds.
        prompt_layer_us: what a decoder layer of a prompt's forward takes beyond its bytes and
            operations, microseconds.
    """

    link_gbps: float
    copy_gbps: float
    hbm_gbps: float
    gemm_tflops: float | None = None
    expert_tflops: float | None = None
    attention_tflops: float | None = None
    attention_past_tflops: float | None = None
    cpu_gbps: float | None = None
    disk_gbps: float | None = None
    layer_us: float = 0.0
    experts_us: float = 0.0
    row_us: float = 0.0
    prompt_layer_us: float = 0.0


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of one decode step, by term.

    Attributes:
        resident_ms: weights that stay in the module tree.
        kv_ms: the cache of all rows.
        experts_ms: for each layer the longer of link and HBM time, summed.
        layers_ms: what the layers take beyond their bytes; 0 at the speed of light.
    """

    resident_ms: float
    kv_ms: float
    experts_ms: float
    layers_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.resident_ms + self.kv_ms + self.experts_ms + self.layers_ms


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
    """One decode step at the speed of light; see `experts_ms` for `hits` and `misses`.

    Args:
        context_tokens: tokens in the caches of all rows together.
    """
    return _step(geometry, rates, experts_ms(geometry, rates, hits, misses), context_tokens, 1)


def predict_step(
    geometry: ModelGeometry,
    rates: Rates,
    *,
    hit_rates: Sequence[float],
    used: Sequence[float],
    context_tokens: int,
    num_rows: int = 1,
) -> StepCost:
    """One decode step as it is expected, layer time included.

    Misses of a layer are taken as independent: the step waits for the link where one expert is
    missing and for HBM where none is, and the mean of that maximum is more than the maximum of the
    means.

    Args:
        hit_rates: share of the distinct experts of each MoE layer that have a slot.
        used: distinct experts of each MoE layer that a step uses; see `distinct_experts`.
        context_tokens: tokens in the caches of all rows together.
        num_rows: sequences in the step.
    """
    total = 0.0
    for layer, hit_rate, num_used in zip(geometry.layers, hit_rates, used, strict=True):
        total += _expected_layer_ms(layer, rates, hit_rate, num_used)
    cost = _step(geometry, rates, total, context_tokens, num_rows)
    layer_us = rates.layer_us + (num_rows - 1) * rates.row_us
    layers_us = geometry.num_layers * layer_us + len(geometry.layers) * rates.experts_us
    return StepCost(cost.resident_ms, cost.kv_ms, cost.experts_ms, layers_us / 1e3)


def predict_load_seconds(geometry: ModelGeometry, rates: Rates) -> float | None:
    """Reading all weights from disk once; `None` without a rate. Pinning and conversion run
    beside it."""
    if rates.disk_gbps is None:
        return None
    return (geometry.expert_bytes + geometry.resident_bytes) / rates.disk_gbps / 1e9


def cpu_break_even(rates: Rates, slot_share: float) -> float | None:
    """Hit rate below which experts computed on the CPU would be faster than experts read from it.

    Compares a step that reads its misses over the link with an engine that has the same device
    memory, keeps whole layers there and computes the others where they lie, reading them at
    `cpu_gbps`: (1 - h) / link = (1 - s) / cpu.

    Args:
        slot_share: s, share of the experts' bytes that have a slot.

    Returns:
        h in 0..1; 0 where the CPU is never faster, `None` where its rate is not known.
    """
    if rates.cpu_gbps is None:
        return None
    if slot_share >= 1:
        return 0.0
    return max(0.0, 1 - (1 - slot_share) * rates.link_gbps / rates.cpu_gbps)


def distinct_experts(layer: MoELayer, num_tokens: float) -> float:
    """Experts that tokens use together, E (1 - (1 - K/E)^T): as if each expert were as likely.

    Real routing has favourites and related neighbours, so this is the most to expect.
    """
    unused: float = (1 - layer.top_k / layer.num_experts) ** num_tokens
    return layer.num_experts * (1 - unused)


def _step(
    geometry: ModelGeometry, rates: Rates, experts: float, context_tokens: int, num_rows: int
) -> StepCost:
    kv_bytes = geometry.kv_fixed_bytes * num_rows + geometry.kv_bytes_per_token * context_tokens
    return StepCost(
        resident_ms=geometry.resident_read_bytes / rates.hbm_gbps / 1e6,
        kv_ms=kv_bytes / rates.hbm_gbps / 1e6,
        experts_ms=experts,
    )


def _expected_layer_ms(layer: MoELayer, rates: Rates, hit_rate: float, used: float) -> float:
    """Mean of max(misses / link, hits / (share * HBM)) over binomially distributed misses."""
    num = max(1, round(used))
    each = used / num / 1e6
    miss_ms = each * layer.expert.record_bytes / rates.link_gbps
    hit_ms = each * slot_read_bytes(layer.expert) / rates.hbm_gbps
    total = 0.0
    for misses in range(num + 1):
        chance = comb(num, misses) * (1 - hit_rate) ** misses * hit_rate ** (num - misses)
        total += chance * max(misses * miss_ms, (num - misses) * hit_ms)
    return total
