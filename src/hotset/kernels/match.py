"""The match rule on the device: one program, no loop over experts, and the host need not wait.

The rule and its words are those of `match_reference`. Two prefix sums rank the missing experts and
the free victims; equal ranks meet in a tile of victims by experts. `retarget` is a device function
without a launch of its own: `combine`, which runs after the slots are filled, carries it out.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotset.kernels.dependent import dependent_launch, wait_for_previous
from hotset.kernels.grouping import Grouping
from hotset.kernels.match_reference import LayerMatch

# Elements of a comparison tile: 32 registers in each of 256 threads. Its short side (victims, ids)
# comes first: it then lies in one thread's registers and is summed without shuffles.
_MAX_TILE = 8192
_EXPERTS_PER_WARP = 32
_MAX_WARPS = 8


@triton.jit
def _missing(
    routed,
    address_W,
    host_address_W,
    admit_E,
    num_experts,
    NUM_IDS: tl.constexpr,
    COUNTED: tl.constexpr,
    IDS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """(missing, its rank among the missing, admit), each [BLOCK_E]."""
    expert = tl.arange(0, BLOCK_E)
    real = expert < num_experts
    address = tl.load(address_W + expert, mask=real, other=0)
    host = tl.load(host_address_W + expert, mask=real, other=0)
    admit = tl.load(admit_E + expert, mask=real, other=0)
    if COUNTED:
        uses = tl.load(routed + expert, mask=real, other=0)
    else:
        uses = tl.zeros((BLOCK_E,), tl.int32)
        for first in range(0, NUM_IDS, IDS):
            ids = _load_ids(routed, first, num_experts, NUM_IDS, IDS)
            uses += tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), 0)
    missing = (uses > 0) & (address == host) & (host != 0) & (admit > 0)
    return missing, tl.cumsum(missing.to(tl.int32), 0) - 1, admit


@triton.jit
def _load_ids(routed, first, num_experts, NUM_IDS: tl.constexpr, IDS: tl.constexpr):
    """Routed ids from place `first` on, -1 for padding and behind the last; int32 [IDS]."""
    place = first + tl.arange(0, IDS)
    ids = tl.load(routed + place, mask=place < NUM_IDS, other=0).to(tl.int64)
    real = (place < NUM_IDS) & (ids >= 0) & (ids < num_experts)
    return tl.where(real, ids, -1).to(tl.int32)


@triton.jit
def _free_victims(
    routed,
    address_W,
    host_address_W,
    victims_V,
    first,
    num_experts,
    num_columns,
    NUM_IDS: tl.constexpr,
    NUM_VICTIMS: tl.constexpr,
    COUNTED: tl.constexpr,
    IDS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """(place, victim, its slot, whether it is free), each [BLOCK_V]."""
    place = first + tl.arange(0, BLOCK_V)
    victim = tl.load(victims_V + place, mask=place < NUM_VICTIMS, other=-1)
    named = (victim >= 0) & (victim < num_columns)
    slot = tl.load(address_W + victim, mask=named, other=0)
    host = tl.load(host_address_W + victim, mask=named, other=0)
    if COUNTED:
        uses = tl.load(routed + victim, mask=named & (victim < num_experts), other=0)
    else:
        uses = tl.zeros((BLOCK_V,), tl.int32)
        for start in range(0, NUM_IDS, IDS):
            ids = _load_ids(routed, start, num_experts, NUM_IDS, IDS)
            uses += tl.sum((ids[:, None] == victim[None, :]).to(tl.int32), 0)
    has_home = (host != 0) | (victim >= num_experts)
    return place, victim, slot, named & has_home & (slot != host) & (uses == 0)


@triton.jit
def _match_kernel(
    routed,
    address_W,
    host_address_W,
    victims_V,
    admit_E,
    fill_E,
    evict_V,
    num_experts,
    num_columns,
    NUM_IDS: tl.constexpr,
    NUM_VICTIMS: tl.constexpr,
    COUNTED: tl.constexpr,
    IDS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    fill = tl.zeros((BLOCK_E,), tl.int64)
    num_free = 0
    for first in tl.static_range(0, NUM_VICTIMS, BLOCK_V):
        place, victim, slot, free = _free_victims(
            routed,
            address_W,
            host_address_W,
            victims_V,
            first,
            num_experts,
            num_columns,
            NUM_IDS,
            NUM_VICTIMS,
            COUNTED,
            IDS,
            BLOCK_V,
        )
        # Behind the victims' loads, so that both groups are under way together.
        if first == 0:
            missing, rank, admit = _missing(
                routed,
                address_W,
                host_address_W,
                admit_E,
                num_experts,
                NUM_IDS,
                COUNTED,
                IDS,
                BLOCK_E,
            )
        order = num_free + tl.cumsum(free.to(tl.int32), 0) - 1
        takes = missing[None, :] & free[:, None] & (rank[None, :] == order[:, None])
        takes &= admit[None, :] > place[:, None]
        fill += tl.sum(tl.where(takes, slot[:, None], 0), 0)
        taken = tl.sum(takes.to(tl.int32), 1) > 0
        tl.store(evict_V + place, tl.where(taken, victim, -1), mask=place < NUM_VICTIMS)
        num_free += tl.sum(free.to(tl.int32), 0)
    expert = tl.arange(0, BLOCK_E)
    tl.store(fill_E + expert, fill, mask=expert < num_experts)


@triton.jit
def retarget(
    address_W,
    host_address_W,
    fill_E,
    evict_V,
    num_experts,
    NUM_VICTIMS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Filled experts to their slots, victims to the host. No expert is both, so order is free.

    Addresses are written behind the wait, since the previous kernel may read them; `EARLY`, what
    the match found is read ahead of it, which is for whoever has a kernel between the two.
    """
    if not EARLY:
        wait_for_previous(DEPENDENT)
    expert = tl.arange(0, BLOCK_E)
    slot = tl.load(fill_E + expert, mask=expert < num_experts, other=0)
    place = tl.arange(0, BLOCK_V)
    victim = tl.load(evict_V + place, mask=place < NUM_VICTIMS, other=-1)
    host = tl.load(host_address_W + victim, mask=victim >= 0, other=0)
    if EARLY:
        wait_for_previous(DEPENDENT)
    tl.store(address_W + expert, slot, mask=slot != 0)
    tl.store(address_W + victim, host, mask=victim >= 0)


def match(ids_TK: torch.Tensor, layer: LayerMatch, *, grouping: Grouping | None = None) -> None:
    """Writes `fill_E` and `evict_V`; see `dispatch.Kernels.match`."""
    layer.check()
    routed = ids_TK if grouping is None else grouping.counts_E
    assert routed.is_contiguous() and (grouping is None or routed.numel() == layer.num_experts)
    num_ids = ids_TK.numel() if grouping is None else 0
    block_e = triton.next_power_of_2(layer.num_experts)
    widest = max(1, _MAX_TILE // block_e)
    _match_kernel[(1,)](
        routed,
        layer.address_W,
        layer.host_address_W,
        layer.victims_V,
        layer.admit_E,
        layer.fill_E,
        layer.evict_V,
        layer.num_experts,
        layer.address_W.numel(),
        NUM_IDS=num_ids,
        NUM_VICTIMS=layer.num_victims,
        COUNTED=grouping is not None,
        IDS=min(triton.next_power_of_2(max(1, num_ids)), widest),
        BLOCK_E=block_e,
        BLOCK_V=min(triton.next_power_of_2(layer.num_victims), widest),
        num_warps=min(_MAX_WARPS, triton.cdiv(block_e, _EXPERTS_PER_WARP)),
        **dependent_launch(ids_TK.device),
    )
