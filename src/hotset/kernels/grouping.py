"""Routed ids to work: pairs of (token, k) sorted by expert, and the blocks that a kernel runs over.

Knows ids only, neither weights nor addresses. Runs on the ids' device without a host
synchronisation: all sizes are upper bounds known from shapes, and what is unused is marked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hotset.kernels.launch import token_block

# Above this many pairs sorting beats comparing all with all in one program.
_MAX_PAIRS_IN_ONE_PROGRAM = 256
_MAX_EXPERTS_IN_ONE_PROGRAM = 1023


@dataclass(frozen=True)
class Grouping:
    """The N = T*K routed pairs of one layer by expert; all tensors int32, on the ids' device.

    Pair `n` is token `n // K`, choice `n % K`. Ids outside [0, E) are padding and treated as
    expert E, behind all others. B bounds the number of blocks from above.

    Attributes:
        order_N: pairs sorted by expert; those of one expert in ascending order.
        counts_E: pairs of each expert. Its sum is the number of pairs that are no padding.
        bounds: [E + 2], pairs of expert e are `order_N[bounds[e]:bounds[e + 1]]`; so are the
            padded ones, for e = E.
        block_expert_B: expert of each block, ascending; -1 behind the last. Experts without
            tokens have no block, so this is the compact list of active experts, an expert
            repeated when it has more than `block_tokens` pairs. Padding has blocks of expert E.
        block_start_B: place in `order_N` of the block's first pair (undefined where unused).
        block_tokens: pairs in one block, at most.
    """

    order_N: torch.Tensor
    counts_E: torch.Tensor
    bounds: torch.Tensor
    block_expert_B: torch.Tensor
    block_start_B: torch.Tensor
    block_tokens: int

    @property
    def num_experts(self) -> int:
        return self.counts_E.numel()

    @property
    def num_blocks(self) -> int:
        """B, known without asking the device."""
        return self.block_expert_B.numel()


def max_blocks(num_pairs: int, num_experts: int, block_tokens: int) -> int:
    """Blocks that `num_pairs` pairs can need: each expert (and padding) wastes part of one."""
    num_groups = min(num_experts + 1, num_pairs)
    return (num_pairs + num_groups * (block_tokens - 1)) // block_tokens


def group_tokens(
    ids_TK: torch.Tensor, num_experts: int, *, block_tokens: int | None = None
) -> Grouping:
    """Groups routed ids by expert.

    Args:
        ids_TK: [T, K] integer ids, contiguous; repeated ids in a row are fine.
        num_experts: E.
        block_tokens: pairs in a block, a power of two; by default what the shapes call for.
    """
    num_tokens, top_k = ids_TK.shape
    block_tokens = block_tokens or token_block(num_tokens, top_k, num_experts)
    if ids_TK.is_cuda and counts_in_programs(ids_TK, num_experts):
        if ids_TK.numel() <= _MAX_PAIRS_IN_ONE_PROGRAM:
            return group_in_one_program(ids_TK, num_experts, block_tokens)
        return group_by_counting(ids_TK, num_experts, block_tokens)
    return group_by_sorting(ids_TK, num_experts, block_tokens)


def counts_in_programs(ids_TK: torch.Tensor, num_experts: int) -> bool:
    """Whether there is something to group, and a program can hold the counts of all experts."""
    return ids_TK.numel() > 0 and num_experts <= _MAX_EXPERTS_IN_ONE_PROGRAM


def keys_of(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The same ids, padding as expert E."""
    return ids.masked_fill((ids < 0) | (ids >= num_experts), num_experts)


def group_by_sorting(ids_TK: torch.Tensor, num_experts: int, block_tokens: int) -> Grouping:
    """`group_tokens` in torch ops, for any size and device."""
    ids_N = ids_TK.reshape(-1)
    device, num_pairs = ids_N.device, ids_N.numel()
    key_N = keys_of(ids_N, num_experts)
    sorted_N, order_N = torch.sort(key_N, stable=True)
    edges = torch.arange(num_experts + 2, device=device, dtype=key_N.dtype)
    bounds = torch.searchsorted(sorted_N, edges, out_int32=True)
    counts = bounds.diff()  # [E + 1], padding last

    blocks = (counts + (block_tokens - 1)) // block_tokens
    block_ends = blocks.cumsum(0, dtype=torch.int32)
    num_blocks = max_blocks(num_pairs, num_experts, block_tokens)
    block_B = torch.arange(num_blocks, device=device, dtype=torch.int32)
    owner_B = torch.searchsorted(block_ends, block_B, right=True)
    owner_B = owner_B.clamp_(max=num_experts)
    nth_B = block_B - (block_ends - blocks)[owner_B]
    expert_B = torch.where(block_B < block_ends[-1:], owner_B, -1)
    return Grouping(
        order_N=order_N.to(torch.int32),
        counts_E=counts[:-1],
        bounds=bounds,
        block_expert_B=expert_B.to(torch.int32),
        block_start_B=(bounds[owner_B] + nth_B * block_tokens).to(torch.int32),
        block_tokens=block_tokens,
    )


def group_in_one_program(ids_TK: torch.Tensor, num_experts: int, block_tokens: int) -> Grouping:
    """`group_tokens` in one launch, for a decode step's few pairs."""
    from hotset.kernels.group_kernel import launch_group

    grouping = _room(ids_TK, num_experts, block_tokens)
    launch_group(ids_TK, grouping)
    return grouping


def group_by_counting(
    ids_TK: torch.Tensor,
    num_experts: int,
    block_tokens: int,
    *,
    place_N: torch.Tensor | None = None,
    first_block: torch.Tensor | None = None,
) -> Grouping:
    """`group_tokens` in four launches, for the many pairs of a prompt.

    Args:
        place_N: int32 [N], written: the place of each pair in `order_N`.
        first_block: int32 [E + 1], written: blocks of the experts before each.
    """
    from hotset.kernels.group_sort import launch_sort

    grouping = _room(ids_TK, num_experts, block_tokens)
    if place_N is None:
        place_N = torch.empty_like(grouping.order_N)
    if first_block is None:
        first_block = torch.empty_like(grouping.bounds[1:])
    launch_sort(ids_TK, grouping, place_N=place_N, first_block=first_block)
    return grouping


def _room(ids_TK: torch.Tensor, num_experts: int, block_tokens: int) -> Grouping:
    """A grouping that is not filled in; behind `counts_E` there is room for one more."""
    num_pairs = ids_TK.numel()
    num_blocks = max_blocks(num_pairs, num_experts, block_tokens)

    def int32(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=ids_TK.device)

    return Grouping(
        order_N=int32(num_pairs),
        counts_E=int32(num_experts + 1)[:-1],
        bounds=int32(num_experts + 2),
        block_expert_B=int32(num_blocks),
        block_start_B=int32(num_blocks),
        block_tokens=block_tokens,
    )
