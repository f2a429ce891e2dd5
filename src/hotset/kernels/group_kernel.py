"""The one-program form of `grouping`: all pairs compared with all, for the few of a decode step.

Knows ids only. Sorting a hundred ids with a library takes a dozen launches; this takes one.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotset.kernels.grouping import Grouping

# Elements of one all-with-all comparison: 64 registers in each of 256 threads.
_MAX_COMPARISONS = 16384


@triton.jit
def _read_keys(ids, pair, num_pairs, num_experts):
    """Expert of each pair, E for padding, E + 1 behind the last pair."""
    key = tl.load(ids + pair, mask=pair < num_pairs, other=0)
    key = tl.where((key < 0) | (key >= num_experts), num_experts, key)
    return tl.where(pair < num_pairs, key, num_experts + 1).to(tl.int32)


@triton.jit
def _group_kernel(
    ids,
    order,
    counts,
    bounds,
    block_expert,
    block_start,
    num_pairs,
    num_experts,
    num_blocks,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    pair = tl.arange(0, BLOCK_N)
    key = _read_keys(ids, pair, num_pairs, num_experts)
    expert = tl.arange(0, BLOCK_E)

    count = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, BLOCK_N, CHUNK):
        some = _read_keys(ids, first + tl.arange(0, CHUNK), num_pairs, num_experts)
        count += tl.sum((some[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + expert, count, mask=expert < num_experts)
    tl.store(bounds, 0)
    tl.store(bounds + 1 + expert, tl.cumsum(count, 0), mask=expert <= num_experts)

    blocks = (count + TOKENS - 1) // TOKENS
    used_blocks = tl.sum(tl.where(expert <= num_experts, blocks, 0), 0)
    unused = (pair >= used_blocks) & (pair < num_blocks)
    tl.store(block_expert + pair, -1, mask=unused)

    for first in range(0, BLOCK_N, CHUNK):
        some_pair = first + tl.arange(0, CHUNK)
        some = _read_keys(ids, some_pair, num_pairs, num_experts)
        smaller = tl.sum((key[None, :] < some[:, None]).to(tl.int32), 1)
        same = (key[None, :] == some[:, None]) & (pair[None, :] < some_pair[:, None])
        earlier = tl.sum(same.to(tl.int32), 1)
        blocks_before = tl.sum(tl.where(expert[None, :] < some[:, None], blocks[None, :], 0), 1)
        real = some_pair < num_pairs
        tl.store(order + smaller + earlier, some_pair, mask=real)
        opens = real & (earlier % TOKENS == 0)
        block = blocks_before + earlier // TOKENS
        tl.store(block_expert + block, some, mask=opens)
        tl.store(block_start + block, smaller + earlier, mask=opens)


def launch_group(ids_TK: torch.Tensor, grouping: Grouping) -> None:
    """Fills the tensors of `grouping` from `ids_TK`; at most 2^31 pairs, any integer dtype."""
    num_pairs, num_experts = ids_TK.numel(), grouping.num_experts
    block_n = triton.next_power_of_2(num_pairs)
    block_e = triton.next_power_of_2(num_experts + 1)  # one more for padding
    _group_kernel[(1,)](
        ids_TK.contiguous(),
        grouping.order_N,
        grouping.counts_E,
        grouping.bounds,
        grouping.block_expert_B,
        grouping.block_start_B,
        num_pairs,
        num_experts,
        grouping.num_blocks,
        BLOCK_N=block_n,
        BLOCK_E=block_e,
        CHUNK=max(1, min(block_n, _MAX_COMPARISONS // max(block_n, block_e))),
        TOKENS=grouping.block_tokens,
        num_warps=8,
    )
