"""Best rates of this machine, measured now: the ceilings that figures are compared with."""

from __future__ import annotations

from dataclasses import replace

import torch

from hotset.bench.timing import time_ms
from hotset.core.costmodel import Rates
from hotset.core.geometry import MoELayer
from hotset.core.hardware import Machine
from hotset.experts.arena import HostArena
from hotset.experts.store import ExpertStore
from hotset.kernels.gather import gather_records
from hotset.runtime.known_rates import described


def measure_rates(store: ExpertStore, *, num_bytes: int = 2**31) -> Rates:
    """Rates between this store's arena and its device; on a CPU all three are of its memory.

    Args:
        store: filled; its arena is what is read, so pages, registration and alignment are those
            of the engine.
        num_bytes: read in one repeat, at most the arena; several times the caches.
    """
    zero_copy, copied = link_rates(
        store.arena, store.layers[0], device=store.device, num_bytes=num_bytes
    )
    return Rates(zero_copy, copied, read_rate(store.device))


def with_known(rates: Rates, machine: Machine) -> Rates:
    """The rates of this run, with what is known of such a machine beforehand and no benchmark
    measures alone: layer times, and the products of experts."""
    known = described(machine)
    if known is None:
        return rates
    found = known.rates()
    return replace(
        rates,
        layer_us=found.layer_us,
        experts_us=found.experts_us,
        row_us=found.row_us,
        prompt_layer_us=found.prompt_layer_us,
        expert_tflops=found.expert_tflops,
    )


def link_rates(
    arena: HostArena, layer: MoELayer, *, device: torch.device, num_bytes: int = 2**31
) -> tuple[float, float]:
    """GB/s of kernels that read records in place, and of one copy of as many by the copy engine.

    Args:
        arena: holds records of `layer` at its beginning.
        num_bytes: read in one repeat, at most the layer.
    """
    record_bytes = layer.expert.record_bytes
    num_records = min(num_bytes // record_bytes, layer.num_experts)
    addresses = torch.tensor([arena.address(0, e) for e in range(num_records)], device=device)
    target = torch.empty((num_records, record_bytes), dtype=torch.uint8, device=device)
    zero_copy = min(
        time_ms(lambda: gather_records(addresses, record_bytes, target), device=device, repeats=5)
    )
    source = arena.record(0, 0, num_records)
    flat = target.view(-1)
    copied = min(time_ms(lambda: flat.copy_(source, non_blocking=True), device=device, repeats=5))
    moved = num_records * record_bytes / 1e6
    return moved / zero_copy, moved / copied


def read_rate(device: torch.device) -> float:
    """GB/s: best of a few read-only reductions over memory that no cache holds."""
    num = 2**30 if device.type == "cuda" else 2**26
    data = torch.randint(0, 2**31 - 1, (num,), dtype=torch.int32, device=device).view(torch.float32)
    best = min(time_ms(lambda: torch.amax(data), device=device, repeats=5))
    return num * 4 / 1e6 / best
