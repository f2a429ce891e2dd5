"""Small MoE layers and stores whose every byte is known, for tests of what moves records.

A record's bytes depend on its layer and its expert alone, padding between fields included, so
that a record in a wrong place, or half of one, never looks right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from hotset.core.geometry import ExpertSpec, Gate, GateForm, MoELayer
from hotset.core.placement import Placement
from hotset.core.slot_pools import SlotPools
from hotset.core.staging import DequantiseRule, StagingRule
from hotset.experts.store import ExpertStore
from hotset.kernels.dispatch import ReferenceKernels
from hotset.runtime.expert_stream import ExpertStream
from hotset.runtime.moe import MoERunner
from hotset.runtime.routing import RoutingLog
from hotset.runtime.tee import Tee

CPU = torch.device("cpu")


def expert(
    hidden: int = 24, intermediate: int = 20, *, dtype: str = "bfloat16", bias: bool = False
) -> ExpertSpec:
    """One expert whose fields do not fill their record."""
    return ExpertSpec.build(
        hidden=hidden,
        intermediate=intermediate,
        gate=Gate(GateForm.PLAIN),
        has_bias=bias,
        dtype=dtype,
    )


def layers(*num_experts: int, experts: Sequence[ExpertSpec] | None = None) -> list[MoELayer]:
    """One MoE layer for each number of experts."""
    specs = experts or [expert()] * len(num_experts)
    return [
        MoELayer(f"layers.{index}.experts", count, 2, spec)
        for index, (count, spec) in enumerate(zip(num_experts, specs, strict=True))
    ]


def pools_of(moe: Sequence[MoELayer], num_slots: int | Mapping[int, int]) -> SlotPools:
    """Slots for these layers: so many of the only record size, or by record size."""
    sizes = [layer.expert.record_bytes for layer in moe]
    if isinstance(num_slots, int):
        num_slots = {sizes[0]: num_slots}
    return SlotPools.build(
        num_experts=[layer.num_experts for layer in moe], record_bytes=sizes, num_slots=num_slots
    )


def make_store(
    moe: Sequence[MoELayer],
    num_slots: int | Mapping[int, int] = 0,
    *,
    staging_records: int = 0,
    num_buffers: int = 2,
    poison: bool = True,
    device: torch.device = CPU,
) -> ExpertStore:
    """A store, on the CPU unless told, its arena filled."""
    store = ExpertStore(
        moe,
        pools_of(moe, num_slots),
        device=device,
        staging_records=staging_records,
        num_buffers=num_buffers,
        poison=poison,
    )
    fill(store)
    return store


def fill(store: ExpertStore) -> None:
    for layer, spec in enumerate(store.layers):
        for index in range(spec.num_experts):
            store.arena.record(layer, index).copy_(record_bytes(store, layer, index))


def record_bytes(store: ExpertStore, layer: int, index: int) -> torch.Tensor:
    """What `fill` put into a record; finite floats in every field."""
    spec = store.layers[layer].expert
    source = torch.Generator().manual_seed(1000 * layer + index)
    data = torch.randint(256, (spec.record_bytes,), dtype=torch.uint8, generator=source)
    for field in spec.layout.fields:
        values = torch.randn(field.shape, generator=source).to(getattr(torch, field.dtype))
        data[field.offset : field.offset + field.nbytes] = values.view(-1).view(torch.uint8)
    return data


def resident(store: ExpertStore, owned: Mapping[int, Sequence[int]]) -> Placement:
    """The placement in which these experts of these layers have slots."""
    pools = store.placement.pools
    mask_LE = np.zeros((len(store.layers), pools.max_experts), dtype=np.bool_)
    for layer, experts in owned.items():
        mask_LE[layer, list(experts)] = True
    return Placement.from_residents(pools, mask_LE)


def runner(
    store: ExpertStore,
    *,
    use_ring: bool = False,
    layer: int = 0,
    stream: ExpertStream | None = None,
    log: RoutingLog | None = None,
    post_norm: nn.Module | None = None,
    tee: Tee | None = None,
    dequantise: DequantiseRule | None = None,
) -> MoERunner:
    """Runs a layer's experts: missing records staged through the ring, or in place."""
    module: Any = SimpleNamespace(has_post_expert_norm=post_norm is not None)
    module.post_expert_norm = post_norm
    return MoERunner(
        layer,
        module,
        store=store,
        kernels=ReferenceKernels(),
        log=log or RoutingLog(store.layers),
        stream=stream or ExpertStream(store),
        staging=StagingRule("ring" if use_ring else "in-place"),
        tee=tee,
        dequantise=dequantise,
    )


def routed(store: ExpertStore, num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Hidden states [T, H], ids [T, 4] and weights; all experts are met in tokens enough."""
    spec = store.layers[0]
    source = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(num_tokens, spec.expert.hidden, generator=source)
    weights_TK, ids_TK = torch.rand(num_tokens, spec.num_experts, generator=source).topk(4)
    return x_TH.to(getattr(torch, spec.expert.dtype)), ids_TK, weights_TK
