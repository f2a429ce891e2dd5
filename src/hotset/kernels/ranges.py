"""Ranges of experts of a grouping, and windows of their blocks: what one launch of a prompt runs.

The blocks of a grouping ascend by expert, so those of a range of experts follow each other, and so
do the places of their pairs. A window is a stretch of a range's blocks whose outputs fit the room
that there is for them. Knows ids and counts, neither weights nor addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hotset.kernels.grouping import (
    Grouping,
    counts_in_programs,
    group_by_counting,
    group_by_sorting,
    keys_of,
)

# Blocks of a range: known, to be asked for, or not to be known.
NumBlocks = int | Callable[[], int] | None


@dataclass(frozen=True)
class Ranges:
    """Routed pairs of a prompt, to be run a range of experts at a time. Tensors are int32.

    Attributes:
        ids_TK: experts of each token as given, each row ascending, padding last.
        grouping: the pairs by expert.
        first_block: [E + 1], blocks of the experts before each; the last is all experts'.
        place_TK: place of each pair in `grouping.order_N`.
        most_blocks: of a window.
    """

    ids_TK: torch.Tensor
    grouping: Grouping
    first_block: torch.Tensor
    place_TK: torch.Tensor
    most_blocks: int

    @property
    def most_rows(self) -> int:
        """Pairs of a window, at most."""
        return min(self.ids_TK.numel(), self.most_blocks * self.grouping.block_tokens)

    def windows(self, num_blocks: NumBlocks) -> Iterator[tuple[int, int]]:
        """(blocks of the range that come before, blocks at most) of each window of a range.

        Args:
            num_blocks: of the range, or how to find out: asked behind the first window, so that
                the device has work while the host waits. `None` where the host cannot know:
                windows beyond the range's end are then empty.
        """
        begin = 0
        if callable(num_blocks):
            yield 0, self.most_blocks
            begin, num_blocks = self.most_blocks, num_blocks()
        end = self.grouping.num_blocks if num_blocks is None else num_blocks
        if end <= begin:
            return
        size = self.most_blocks
        if num_blocks is not None:  # even ones
            size = -(-(end - begin) // -(-(end - begin) // size))
        for start in range(begin, end, size):
            yield start, min(size, end - start)


def sort_choices(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's choices by expert: then the order of its sum is the order of the ranges.

    Args:
        ids_TK: [T, K] integers of any strides; padding becomes E.
        weights_TK: [T, K] of any dtype and strides.

    Returns:
        ids, int32, and their weights, both contiguous; equal ids in the order of the choices.
    """
    if ids_TK.is_cuda and ids_TK.numel() > 0:
        return sort_choices_in_one_launch(ids_TK, weights_TK, num_experts)
    ids_TK, order_TK = keys_of(ids_TK, num_experts).sort(dim=1, stable=True)
    return ids_TK.to(torch.int32).contiguous(), weights_TK.gather(1, order_TK).contiguous()


def sort_choices_in_one_launch(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sort_choices` in registers: each of a token's choices is compared with the others."""
    from hotset.kernels.group_sort import launch_choices

    sorted_TK = torch.empty(ids_TK.shape, dtype=torch.int32, device=ids_TK.device)
    sorted_weights_TK = torch.empty(
        weights_TK.shape, dtype=weights_TK.dtype, device=weights_TK.device
    )
    launch_choices(
        ids_TK, weights_TK, num_experts, sorted_TK=sorted_TK, sorted_weights_TK=sorted_weights_TK
    )
    return sorted_TK, sorted_weights_TK


def group_ranges(
    ids_TK: torch.Tensor, num_experts: int, *, block_tokens: int, most_rows: int
) -> Ranges:
    """Groups routed ids for ranges, without a host synchronisation.

    Args:
        ids_TK: [T, K] integers, contiguous, each row ascending, padding last.
        num_experts: E.
        block_tokens: pairs of a block.
        most_rows: pairs of a window, at least one block's.
    """
    most_blocks = max(1, most_rows // block_tokens)
    place_TK = torch.empty(ids_TK.shape, dtype=torch.int32, device=ids_TK.device)
    first_block = torch.empty(num_experts + 1, dtype=torch.int32, device=ids_TK.device)
    if ids_TK.is_cuda and counts_in_programs(ids_TK, num_experts):
        grouping = group_by_counting(
            ids_TK,
            num_experts,
            block_tokens,
            place_N=place_TK.view(-1),
            first_block=first_block,
        )
    else:
        grouping = group_by_sorting(ids_TK, num_experts, block_tokens)
        first_block[0] = 0
        blocks_E = (grouping.counts_E + (block_tokens - 1)) // block_tokens
        torch.cumsum(blocks_E, 0, out=first_block[1:])
        places = torch.arange(ids_TK.numel(), dtype=torch.int32, device=ids_TK.device)
        place_TK.view(-1).scatter_(0, grouping.order_N.long(), places)
    return Ranges(ids_TK, grouping, first_block, place_TK, most_blocks)
