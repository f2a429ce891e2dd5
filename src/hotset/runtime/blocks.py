"""A block of routed tokens, as the stock model hands it to the experts of a layer. Only data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Block:
    """Tokens that run together.

    Attributes:
        x_TH: hidden states, in the experts' dtype.
        ids_TK: experts of each token; ids outside 0..E-1 are padding.
        weights_TK: routing weights.
    """

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.x_TH)

    @classmethod
    def joined(cls, blocks: Sequence[Block]) -> Block:
        """One block of the tokens of all, in turn."""
        if len(blocks) == 1:
            return blocks[0]
        return cls(
            torch.cat([block.x_TH for block in blocks]),
            torch.cat([block.ids_TK for block in blocks]),
            torch.cat([block.weights_TK for block in blocks]),
        )

    def split(self, num_tokens: int) -> list[Block]:
        """Blocks of at most so many tokens."""
        parts = zip(
            self.x_TH.split(num_tokens),
            self.ids_TK.split(num_tokens),
            self.weights_TK.split(num_tokens),
            strict=True,
        )
        return [Block(*part) for part in parts]
