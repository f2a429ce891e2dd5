"""The four-launch form of `grouping`: a counting sort, for the many pairs of a prompt.

Parts of the pairs count what they have of each expert, the counts of all parts are summed up,
blocks are laid out, and then every pair knows its place. A library's sort of them takes some thirty
launches. Beside it the rows of a prompt by expert, in one. Knows ids and what belongs to them;
nothing of tokens' values.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from hotset.kernels.grouping import Grouping
from hotset.kernels.relaunch import Relaunch

# Pairs of a part: each is compared with all of its part.
_PART = 128
# Elements of one comparison: 64 registers in each of 256 threads.
_MAX_COMPARISONS = 16384
# Parts whose counts are summed up at a time.
_SUMMED = 1024


@triton.jit
def _keys(ids, pair, num_pairs, num_experts):
    """Expert of each pair, E for padding, E + 1 behind the last pair."""
    key = tl.load(ids + pair, mask=pair < num_pairs, other=0)
    key = tl.where((key < 0) | (key >= num_experts), num_experts, key)
    return tl.where(pair < num_pairs, key, num_experts + 1).to(tl.int32)


# One program for prompts of every length: sizes are data.
@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_parts"])
def _count_kernel(
    ids,
    counts_EP,
    num_pairs,
    num_experts,
    num_parts,
    PART: tl.constexpr,
    SOME: tl.constexpr,
):
    part = tl.program_id(0)
    key = _keys(ids, part * PART + tl.arange(0, PART), num_pairs, num_experts)
    for first in range(0, num_experts + 1, SOME):
        expert = first + tl.arange(0, SOME)
        count = tl.sum((key[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(counts_EP + expert * num_parts + part, count, mask=expert <= num_experts)


@triton.jit(do_not_specialize=["num_parts"])
def _sum_kernel(counts_EP, total_E, num_parts, BLOCK: tl.constexpr):
    """Counts of each part to those of all parts before it; `total_E` gets those of all."""
    row = counts_EP + tl.program_id(0) * num_parts
    before = tl.full((), 0, tl.int32)
    for first in range(0, num_parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        count = tl.load(row + part, mask=part < num_parts, other=0)
        tl.store(row + part, before + tl.cumsum(count, 0) - count, mask=part < num_parts)
        before += tl.sum(count, 0)
    tl.store(total_E + tl.program_id(0), before)


@triton.jit(do_not_specialize=["num_experts", "num_blocks"])
def _block_kernel(
    total_E,
    bounds,
    first_block,
    block_expert,
    block_start,
    num_experts,
    num_blocks,
    TOKENS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    expert = tl.arange(0, BLOCK_E)
    count = tl.load(total_E + expert, mask=expert <= num_experts, other=0)
    blocks = (count + TOKENS - 1) // TOKENS
    ends = tl.cumsum(blocks, 0)
    if tl.program_id(0) == 0:
        tl.store(bounds, 0)
        tl.store(bounds + 1 + expert, tl.cumsum(count, 0), mask=expert <= num_experts)
        tl.store(first_block, 0)
        tl.store(first_block + 1 + expert, ends, mask=expert < num_experts)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    before = ends[None, :] <= block[:, None]
    owner = tl.sum((before & (expert <= num_experts)[None, :]).to(tl.int32), 1)
    nth = block - tl.sum(tl.where(before, blocks[None, :], 0), 1)
    start = tl.sum(tl.where(before, count[None, :], 0), 1) + nth * TOKENS
    tl.store(block_expert + block, tl.where(owner <= num_experts, owner, -1), block < num_blocks)
    tl.store(block_start + block, start, block < num_blocks)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_parts"])
def _pair_kernel(
    ids,
    before_EP,
    bounds,
    order,
    places,
    num_pairs,
    num_experts,
    num_parts,
    PART: tl.constexpr,
    SOME: tl.constexpr,
):
    part = tl.program_id(0)
    pair = part * PART + tl.arange(0, PART)
    key = _keys(ids, pair, num_pairs, num_experts)
    real = pair < num_pairs
    place = tl.load(before_EP + key * num_parts + part, mask=real, other=0)
    place += tl.load(bounds + key, mask=real, other=0)
    for first in range(0, PART, SOME):
        other = part * PART + first + tl.arange(0, SOME)
        same = _keys(ids, other, num_pairs, num_experts)[None, :] == key[:, None]
        place += tl.sum((same & (other[None, :] < pair[:, None])).to(tl.int32), 1)
    tl.store(order + place, pair, mask=real)
    tl.store(places + pair, place, mask=real)


def launch_sort(
    ids_TK: torch.Tensor, grouping: Grouping, *, place_N: torch.Tensor, first_block: torch.Tensor
) -> None:
    """Fills the tensors of `grouping` from `ids_TK`: at least one pair, any integer dtype.

    Args:
        grouping: its `counts_E` are the first E of E + 1 numbers, all of which are written.
        place_N: int32 [N], place of each pair in `order_N`.
        first_block: int32 [E + 1], blocks of the experts before each.
    """
    num_pairs, num_experts = ids_TK.numel(), grouping.num_experts
    num_parts = triton.cdiv(num_pairs, _PART)
    ids = ids_TK.contiguous()
    counts_EP = torch.empty(num_experts + 1, num_parts, dtype=torch.int32, device=ids.device)
    sizes = (num_pairs, num_experts, num_parts)
    run = _sorts(num_experts, grouping.block_tokens)
    run.count((num_parts,), (ids, counts_EP), sizes)
    run.sum((num_experts + 1,), (counts_EP, grouping.counts_E), (num_parts,))
    run.block(
        (triton.cdiv(grouping.num_blocks, run.blocks),),
        (
            grouping.counts_E,
            grouping.bounds,
            first_block,
            grouping.block_expert_B,
            grouping.block_start_B,
        ),
        (num_experts, grouping.num_blocks),
    )
    run.pair((num_parts,), (ids, counts_EP, grouping.bounds, grouping.order_N, place_N), sizes)


@dataclass(frozen=True)
class _Sorts:
    """What launches the four kernels, and blocks of a program of the third."""

    count: Relaunch
    sum: Relaunch
    block: Relaunch
    pair: Relaunch
    blocks: int


@cache
def _sorts(num_experts: int, block_tokens: int) -> _Sorts:
    block_e = triton.next_power_of_2(num_experts + 1)  # one more for padding
    blocks = max(1, _MAX_COMPARISONS // block_e)
    part = {"PART": _PART, "SOME": _MAX_COMPARISONS // _PART, "num_warps": 8}
    of_block = {"TOKENS": block_tokens, "BLOCK_E": block_e, "BLOCKS": blocks, "num_warps": 8}
    return _Sorts(
        count=Relaunch(_count_kernel, part),
        sum=Relaunch(_sum_kernel, {"BLOCK": _SUMMED, "num_warps": 4}),
        block=Relaunch(_block_kernel, of_block),
        pair=Relaunch(_pair_kernel, part),
        blocks=blocks,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _choices_kernel(
    ids_TK,
    weights_TK,
    sorted_TK,
    sorted_weights_TK,
    num_tokens,
    num_experts,
    id_row,
    id_column,
    weight_row,
    weight_column,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    choice = tl.arange(0, CHOICES)
    real = (token < num_tokens)[:, None] & (choice < TOP_K)[None, :]
    place = token[:, None] * id_row + choice[None, :] * id_column
    key = tl.load(ids_TK + place, mask=real, other=0)
    key = tl.where((key < 0) | (key >= num_experts), num_experts, key)
    key = tl.where(choice[None, :] < TOP_K, key, num_experts + 1).to(tl.int32)
    earlier = (choice[None, None, :] < choice[None, :, None]) & (key[:, None, :] == key[:, :, None])
    rank = tl.sum(((key[:, None, :] < key[:, :, None]) | earlier).to(tl.int32), 2)
    out = token[:, None] * TOP_K + rank
    tl.store(sorted_TK + out, key, mask=real)
    place = token[:, None] * weight_row + choice[None, :] * weight_column
    tl.store(sorted_weights_TK + out, tl.load(weights_TK + place, mask=real), mask=real)


def launch_choices(
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    num_experts: int,
    *,
    sorted_TK: torch.Tensor,
    sorted_weights_TK: torch.Tensor,
) -> None:
    """Writes each token's experts, int32 and ascending, and their weights, both contiguous."""
    num_tokens, top_k = ids_TK.shape
    tokens, run = _choices(top_k)
    strides = (*ids_TK.stride(), *weights_TK.stride())
    run(
        (triton.cdiv(num_tokens, tokens),),
        (ids_TK, weights_TK, sorted_TK, sorted_weights_TK),
        (num_tokens, num_experts, *strides),
    )


@cache
def _choices(top_k: int) -> tuple[int, Relaunch]:
    """Tokens of a program, and what launches it."""
    choices = triton.next_power_of_2(top_k)
    tokens = max(1, _MAX_COMPARISONS // 2 // choices**2)
    constants = {"TOP_K": top_k, "CHOICES": choices, "TOKENS": tokens, "num_warps": 4}
    return tokens, Relaunch(_choices_kernel, constants)
