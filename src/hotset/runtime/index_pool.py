"""What indexers keep of each token: one key for each candidate, in the blocks of the KV pool.

A candidate is a position, or a pool of neighbours whose key is known when its last token is there:
until then a row's newest tokens are kept as they are. Candidate c of a row lies in the block of its
tokens, so a block that is shared with another row brings its candidates along. One block more than
the KV pool has is where padding is written. Knows rows, positions and places; no scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hotset.core.geometry import AttentionLayer, Indexer
from hotset.models.indexers import PooledKeys, pool_keys


@dataclass(frozen=True)
class BlocksOf:
    """The KV pool whose blocks are spoken of: of full attention."""

    num_blocks: int
    block_tokens: int
    num_rows: int
    dtype: torch.dtype
    device: torch.device


class IndexPool:
    """Keys of one layer's indexer.

    Args:
        indexer: whose.
        of: the KV pool.
        poison: fill its tensors with NaN.

    Attributes:
        keys: [num_blocks + 1, block_tokens / pool, D].
        recent: keys and gates of the tokens of each row's last pool, by place in the pool,
            [num_rows + 1, pool, 2 D]; `None` where a candidate is a position.
    """

    def __init__(self, indexer: Indexer, of: BlocksOf, *, poison: bool = False) -> None:
        assert of.block_tokens % indexer.pool == 0, (of, indexer)
        self.indexer, self.block_tokens = indexer, of.block_tokens

        def make(*shape: int) -> torch.Tensor:
            tensor = torch.empty(shape, dtype=of.dtype, device=of.device)
            return tensor.fill_(torch.nan) if poison else tensor

        self.keys = make(of.num_blocks + 1, of.block_tokens // indexer.pool, indexer.dim)
        self.recent: torch.Tensor | None = None
        if indexer.pool > 1:
            self.recent = make(of.num_rows + 1, indexer.pool, 2 * indexer.dim)

    @property
    def nbytes(self) -> int:
        """Equal to what `index_pool_bytes` says beforehand."""
        return self.keys.nbytes + (0 if self.recent is None else self.recent.nbytes)

    def append(
        self,
        new: torch.Tensor | PooledKeys,
        rows_B: torch.Tensor,
        table_BN: torch.Tensor,
        lengths_B: torch.Tensor,
    ) -> None:
        """One new token of each row, its last one. Nothing waits for the device.

        Args:
            new: keys [B, 1, D], or what pooled ones are made of.
            rows_B: int64, `num_rows` for padding.
            table_BN: int32 block ids.
            lengths_B: int32, with the new token; 0 for padding.
        """
        pool = self.indexer.pool
        position_B = lengths_B.long() - 1
        if isinstance(new, PooledKeys):
            assert self.recent is not None
            place_B = position_B.clamp(min=0) % pool
            self.recent[rows_B, place_B] = torch.cat((new.keys_BTD, new.gates_BTD), -1)[:, 0]
            # Until the pool is whole its key is made of an earlier pool's tokens too, and not read.
            keys_BGD, gates_BGD = self.recent[rows_B].chunk(2, dim=-1)
            keys_BD = pool_keys(keys_BGD, gates_BGD, new.bias_GD)
        else:
            keys_BD = new[:, 0]
        block_B1 = (position_B.clamp(min=0) // self.block_tokens)[:, None]
        block_B = table_BN.gather(1, block_B1)[:, 0].long()
        block_B = torch.where(lengths_B > 0, block_B, len(self.keys) - 1)
        within_B = position_B.clamp(min=0) % self.block_tokens // pool
        self.keys[block_B, within_B] = keys_BD

    def extend(
        self, new: torch.Tensor | PooledKeys, row: int, table_N: torch.Tensor, start: int
    ) -> None:
        """New tokens of one row.

        Args:
            new: keys [1, T, D], or what pooled ones are made of.
            table_N: int32, the row's block ids.
            start: position of the first one.
        """
        pool, first = self.indexer.pool, start
        if isinstance(new, PooledKeys):
            assert self.recent is not None
            first, stop = start // pool * pool, start + new.keys_BTD.shape[1]
            both_TD = torch.cat((new.keys_BTD, new.gates_BTD), dim=-1)[0]
            both_TD = torch.cat((self.recent[row, : start - first], both_TD))
            left = (stop - first) % pool
            whole_TD = both_TD[: len(both_TD) - left]
            self.recent[row, :left] = both_TD[len(both_TD) - left :]
            keys_PGD, gates_PGD = whole_TD.unflatten(0, (-1, pool)).chunk(2, dim=-1)
            keys_PD = pool_keys(keys_PGD, gates_PGD, new.bias_GD)
        else:
            keys_PD = new[0]
        per_block = self.block_tokens // pool
        p = torch.arange(len(keys_PD), device=keys_PD.device) + first // pool
        self.keys[table_N[p // per_block].long(), p % per_block] = keys_PD


def index_pool_bytes(
    layers: Sequence[AttentionLayer],
    *,
    num_blocks: int,
    block_tokens: int,
    num_rows: int,
    element_bytes: int,
) -> int:
    """Bytes of the `IndexPool`s of layers whose KV pools have so many blocks."""
    total = 0
    for layer in layers:
        if layer.indexer is not None:
            keys = (num_blocks + 1) * (block_tokens // layer.indexer.pool) * layer.indexer.dim
            total += keys * element_bytes
            total += (num_rows + 1) * layer.indexer.row_bytes(element_bytes)
    return total
