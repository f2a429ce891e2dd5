"""Machines and model shapes for planning tests; T0 and T1 are the tiny shapes of bug reports."""

from __future__ import annotations

from dataclasses import replace

from hotset.core.geometry import ExpertSpec, Gate, GateForm, ModelGeometry, MoELayer
from hotset.core.hardware import HostMemory, Machine
from hotset.core.units import GIB


def geometry(
    *,
    hidden: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    intermediate: int,
    dense_layers: int = 0,
    **changes: object,
) -> ModelGeometry:
    """A model of equal layers, of which the first `dense_layers` have no experts."""
    expert = expert_of(hidden, intermediate)
    layers = tuple(
        MoELayer(f"model.layers.{index}.mlp.experts", num_experts, top_k, expert)
        for index in range(dense_layers, num_layers)
    )
    plain = ModelGeometry(
        model_type="qwen3_moe",
        dtype="bfloat16",
        layers=layers,
        resident_bytes=100_000,
        kv_bytes_per_token=num_layers * 256,
        kv_fixed_bytes=0,
        hidden=hidden,
        vocab=256,
        num_layers=num_layers,
        max_context=8192,
        activation_bytes_per_token=1000,
        activation_bytes_per_context_token=16,
        activation_bytes_per_pair=3,
    )
    return replace(plain, **changes)


def expert_of(hidden: int, intermediate: int) -> ExpertSpec:
    return ExpertSpec.build(
        hidden=hidden,
        intermediate=intermediate,
        gate=Gate(GateForm.PLAIN),
        has_bias=False,
        dtype="bfloat16",
    )


def t0(**changes: object) -> ModelGeometry:
    """16 experts of 12,288 bytes."""
    return geometry(hidden=64, num_layers=2, num_experts=8, top_k=2, intermediate=32, **changes)


def t1(**changes: object) -> ModelGeometry:
    """48 experts of 98,304 bytes."""
    return geometry(hidden=128, num_layers=3, num_experts=16, top_k=4, intermediate=128, **changes)


def t4(**changes: object) -> ModelGeometry:
    """Layer 0 dense, two layers of 8 experts."""
    return geometry(
        hidden=64,
        num_layers=3,
        num_experts=8,
        top_k=2,
        intermediate=32,
        dense_layers=1,
        **changes,
    )


def qwen3_30b() -> ModelGeometry:
    """Shape of Qwen3-30B-A3B in bfloat16: 54 GiB of experts."""
    return geometry(
        hidden=2048,
        num_layers=48,
        num_experts=128,
        top_k=8,
        intermediate=768,
        resident_bytes=3_080_000_000,
        kv_bytes_per_token=98_304,
        vocab=151_936,
        max_context=40_960,
        activation_bytes_per_token=60_000,
    )


def cpu(*, available: int = 64 * GIB, container: int | None = None) -> Machine:
    return Machine(
        device="cpu",
        device_name="a CPU",
        vram_total_bytes=0,
        vram_free_bytes=0,
        host=HostMemory(128 * GIB, available, container, None),
        num_cpu_cores=8,
    )


def gpu(*, free: int = 24 * GIB, available: int = 120 * GIB, memlock: int | None = None) -> Machine:
    return Machine(
        device="cuda",
        device_name="a GPU",
        vram_total_bytes=free + GIB,
        vram_free_bytes=free,
        host=HostMemory(128 * GIB, available, None, memlock),
        num_cpu_cores=8,
    )
