"""The weighted sum of experts' outputs for a block of tokens, a range of experts at a time.

Two forms, chosen by the number of tokens: few keep every output and sum at the end in the order of
their choices; many add up range by range, in ascending expert id. Either way the bits do not
depend on the ranges, and where a record is read is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hotset.core.geometry import ExpertSpec
from hotset.core.slot_pools import IntArray
from hotset.kernels.dispatch import Kernels
from hotset.kernels.match_reference import LayerMatch
from hotset.kernels.ranges import NumBlocks, group_ranges, sort_choices
from hotset.runtime.blocks import Block

PostNorm = Callable[[torch.Tensor], torch.Tensor]


class Adds(Protocol):
    """Runs a layer's experts range by range."""

    def add(self, address_E: torch.Tensor, *, first: int, stop: int) -> None:
        """Runs the experts `first` .. `stop` - 1 on their tokens.

        Args:
            address_E: where each is read; 0 for experts outside the range.
        """


class BlockSum(Adds, Protocol):
    """A block of tokens, or several as one, on its way through a layer."""

    @property
    def spec(self) -> ExpertSpec:
        """Of the records that it is given addresses of."""

    @property
    def num_tokens(self) -> int:
        """Of the block."""

    @property
    def kernel_tokens(self) -> int:
        """Tokens of an expert for which the kernels read its record once."""

    @property
    def counts(self) -> torch.Tensor:
        """int32 [E], tokens of each expert, on the device."""

    def expect(self, counts_E: Callable[[], IntArray]) -> None:
        """Tells it how to learn `counts` on the host; no bit depends on that."""

    def total(self) -> torch.Tensor:
        """The block's output, [T, H] in the dtype of its input, once all ranges were added."""


class FewTokens:
    """All outputs in one buffer; the sum is in the order of the choices.

    Args:
        kernels, spec: of the layer.
        block: the tokens.
        fill_E: slots to fill as records are read, 0 for none. Given always, so that one program
            runs whether there is something to fill or not.
        post_norm: applied to each output before it is weighted.
        behind_match: ranges are added right behind the match of the block's ids.
    """

    def __init__(
        self,
        kernels: Kernels,
        spec: ExpertSpec,
        block: Block,
        *,
        fill_E: torch.Tensor,
        post_norm: PostNorm | None,
        behind_match: bool = False,
    ) -> None:
        self._kernels, self.spec, self._block = kernels, spec, block
        self._fill_E, self._post_norm = fill_E, post_norm
        # Without a choice nothing is launched between the match and the sum, which waits then.
        self._behind_match = behind_match and block.ids_TK.numel() > 0
        # The kernels of fewest tokens take the ids as they are.
        groups = kernels.groups(block.num_tokens, block.ids_TK.shape[1], spec)
        self.grouping = kernels.group(block.ids_TK, fill_E.numel()) if groups else None
        # Given, and not made by the kernel: whole or in ranges, it is then one program.
        self._y_TKH = outputs_of(block)

    def add(self, address_E: torch.Tensor, *, first: int, stop: int) -> None:
        self._kernels.expert_outputs(
            self._block.x_TH,
            self._block.ids_TK,
            address_E,
            self.spec,
            grouping=self.grouping,
            out=self._y_TKH,
            fill_E=self._fill_E,
            behind_match=self._behind_match,
        )

    @property
    def num_tokens(self) -> int:
        return self._block.num_tokens

    @property
    def kernel_tokens(self) -> int:
        return self.num_tokens if self.grouping is None else self.grouping.block_tokens

    @property
    def counts(self) -> torch.Tensor:
        ids_TK, num_experts = self._block.ids_TK, self._fill_E.numel()
        return (self.grouping or self._kernels.group(ids_TK, num_experts)).counts_E

    def expect(self, counts_E: Callable[[], IntArray]) -> None:
        """One launch runs all its blocks, few as they are."""

    def total(self, *, matched: LayerMatch | None = None) -> torch.Tensor:
        x_TH, y_TKH = self._block.x_TH, self._y_TKH
        if self._post_norm is not None:
            y_TKH = self._post_norm(y_TKH.to(x_TH.dtype)).float()
        return self._kernels.combine(
            y_TKH,
            self._block.weights_TK,
            x_TH.dtype,
            matched=matched,
            behind_experts=self._behind_match and self._post_norm is None,
        )


class ManyTokens:
    """One running sum for each token; outputs live only until they are added.

    Args:
        kernels: of the layer.
        spec: of the records that it is given addresses of.
        blocks: the tokens; several only where the kernels join them.
        num_experts: E.
        kernel_tokens: tokens of a block of the kernels.
        most_rows: outputs that are kept at a time, see `core.staging.block_tokens`.
        post_norm: applied to each output before it is weighted.
    """

    def __init__(
        self,
        kernels: Kernels,
        spec: ExpertSpec,
        blocks: Sequence[Block],
        *,
        num_experts: int,
        kernel_tokens: int,
        most_rows: int,
        post_norm: PostNorm | None,
    ) -> None:
        self._kernels, self.spec, self._post_norm = kernels, spec, post_norm
        assert len(blocks) == 1 or kernels.joins_blocks
        block = Block.joined(blocks)
        self._x_TH = block.x_TH
        ids_TK, self._weights_TK = sort_choices(block.ids_TK, block.weights_TK, num_experts)
        self._ranges = group_ranges(
            ids_TK, num_experts, block_tokens=kernel_tokens, most_rows=most_rows
        )
        self._sum_TH = torch.empty_like(block.x_TH, dtype=torch.float32)
        self._out_TH = torch.zeros_like(block.x_TH)  # of a token that has no expert
        self._counts_E: Callable[[], IntArray] | None = None
        self._blocks_E: IntArray | None = None

    def expect(self, counts_E: Callable[[], IntArray]) -> None:
        """Ranges then run just the blocks that they have."""
        self._counts_E = counts_E

    def _num_blocks(self, first: int, stop: int) -> NumBlocks:
        if self._blocks_E is not None:
            return int(self._blocks_E[first:stop].sum())
        ask = self._counts_E
        if ask is None:
            return None

        def asked() -> int:
            self._blocks_E = -(-ask() // self.kernel_tokens)
            return int(self._blocks_E[first:stop].sum())

        return asked

    def add(self, address_E: torch.Tensor, *, first: int, stop: int) -> None:
        self._kernels.add_experts(
            self._x_TH,
            self._weights_TK,
            address_E,
            self.spec,
            ranges=self._ranges,
            first=first,
            stop=stop,
            sum_TH=self._sum_TH,
            out_TH=self._out_TH,
            num_blocks=self._num_blocks(first, stop),
            post_norm=self._post_norm,
        )

    @property
    def num_tokens(self) -> int:
        return len(self._x_TH)

    @property
    def kernel_tokens(self) -> int:
        return self._ranges.grouping.block_tokens

    @property
    def counts(self) -> torch.Tensor:
        return self._ranges.grouping.counts_E

    def total(self) -> torch.Tensor:
        return self._out_TH


def outputs_of(block: Block) -> torch.Tensor:
    """Room for the output of every choice, [T, K, H] FP32."""
    shape = (*block.ids_TK.shape, block.x_TH.shape[1])
    return block.x_TH.new_empty(shape, dtype=torch.float32)
