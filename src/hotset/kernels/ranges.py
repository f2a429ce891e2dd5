"""Ranges of experts of a grouping, and windows of their blocks: what one launch of a prompt runs.

The blocks of a grouping ascend by expert, so those of a range of experts follow each other, and so
do the places of their pairs. A window is a stretch of a range's blocks whose outputs fit the room
that there is for them. Knows ids and counts, neither weights nor addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hotset.kernels.grouping import Grouping, group_tokens


@dataclass(frozen=True)
class Ranges:
    """Routed pairs of a prompt, to be run a range of experts at a time. Tensors are int32.

    Attributes:
        ids_TK: experts of each token as given, each row ascending, padding anywhere.
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

    def windows(self, num_blocks: int | None) -> Iterator[tuple[int, int]]:
        """(blocks of the range that come before, blocks at most) of each window of a range.

        Args:
            num_blocks: of the range; `None` where the host does not know: windows beyond the
                range's end are then empty.
        """
        most = self.grouping.num_blocks if num_blocks is None else num_blocks
        num_windows = -(-most // self.most_blocks)
        if num_windows == 0:
            return
        size = self.most_blocks if num_blocks is None else -(-most // num_windows)
        for start in range(0, most, size):
            yield start, min(size, most - start)


def group_ranges(
    ids_TK: torch.Tensor, num_experts: int, *, block_tokens: int, most_rows: int
) -> Ranges:
    """Groups routed ids for ranges, without a host synchronisation.

    Args:
        ids_TK: [T, K] integers, contiguous, each row ascending.
        num_experts: E.
        block_tokens: pairs of a block.
        most_rows: pairs of a window, at least one block's.
    """
    grouping = group_tokens(ids_TK, num_experts, block_tokens=block_tokens)
    order_N, counts_E = grouping.order_N, grouping.counts_E
    first_block = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids_TK.device)
    torch.cumsum((counts_E + (block_tokens - 1)) // block_tokens, 0, out=first_block[1:])
    place_N = torch.empty_like(order_N)
    places = torch.arange(len(order_N), dtype=torch.int32, device=ids_TK.device)
    place_N.scatter_(0, order_N.long(), places)
    most_blocks = max(1, most_rows // block_tokens)
    return Ranges(ids_TK, grouping, first_block, place_N.view(ids_TK.shape), most_blocks)
