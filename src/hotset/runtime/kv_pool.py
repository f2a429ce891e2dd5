"""The KV cache's memory: blocks of tokens per layer, and which sequence owns which block.

A *row* is one sequence. Layers of one kind (full attention, or one sliding window) share block
ids: block 7 of a row is block 7 in each of them. A row of a window owns a ring of blocks that is
reused, one of full attention as many as it is long. Ownership and lengths live on the host, as
plain numbers; what a step needs of them on the device, the step has (`kv_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hotset.core.errors import RequestError
from hotset.core.geometry import AttentionLayer
from hotset.kernels.attention import ring_blocks

# Tokens of a block. A row wastes half a block on average, and a ring up to one block and what
# rounding adds (a window of 128: 160 tokens with blocks of 32, 192 with 64), which speaks for
# small ones; the table of a 128k context still has only 4,096 entries, and a block of one layer
# is tens of KiB, far more than a memory transaction.
BLOCK_TOKENS = 32


class BlockAllocator:
    """Hands out block ids 0 .. num_blocks - 1; what was freed last goes first."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks. The caller has looked that there are enough."""
        assert 0 <= num_blocks <= len(self._free), (num_blocks, len(self._free))
        blocks = [self._free.pop() for _ in range(num_blocks)]
        self._used.update(blocks)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Gives blocks back, each once."""
        assert self._used.issuperset(blocks) and len(set(blocks)) == len(blocks), blocks
        self._used.difference_update(blocks)
        self._free.extend(blocks)


@dataclass
class KVKind:
    """The layers that share block ids, and the blocks of every row.

    Attributes:
        window: of the layers; `None` for full attention.
        row_blocks: most blocks of one row, N: the columns of a block table. A ring's is smaller
            than its rows are long.
        table_RN: block ids of each row, int32 [rows, N]; entries beyond `num_owned` are 0.
        num_owned: blocks that each row owns.
    """

    window: int | None
    row_blocks: int
    allocator: BlockAllocator
    table_RN: NDArray[np.int32]
    num_owned: list[int]


class KVPool:
    """Pools of all layers, and their rows.

    Args:
        layers: what `find_attention` found.
        num_rows: sequences at a time.
        context_tokens: most tokens of one of them.
        dtype: of keys and values.
        device: of the pools.
        block_tokens: tokens of a block.
        full_tokens: tokens of all rows together that full attention has room for; default
            `num_rows * context_tokens`, with which no admitted row can run out of blocks.
        poison: fill the pools with NaN, so that reading what was not written shows.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        *,
        num_rows: int,
        context_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        block_tokens: int = BLOCK_TOKENS,
        full_tokens: int | None = None,
        poison: bool = False,
    ) -> None:
        assert layers and num_rows > 0 and context_tokens > 0 and block_tokens > 0
        self.layers = {layer.index: layer for layer in layers}
        self.num_rows, self.context_tokens = num_rows, context_tokens
        self.block_tokens, self.device = block_tokens, device
        sizes = _num_blocks(layers, num_rows, context_tokens, block_tokens, full_tokens)
        self.kinds = {window: _kind(window, num_rows, *sizes[window]) for window in sizes}
        self.pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in layers:
            shape = (sizes[layer.window][1], block_tokens, layer.num_kv_heads)
            keys, values = (
                torch.empty(*shape, dim, dtype=dtype, device=device)
                for dim in (layer.key_dim, layer.value_dim)
            )
            self.pools[layer.index] = keys, values
            if poison:
                keys.fill_(torch.nan)
                values.fill_(torch.nan)
        self.lengths = [0] * num_rows
        self._open: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all pools; equal to what `kv_pool_bytes` says beforehand."""
        return sum(tensor.nbytes for pair in self.pools.values() for tensor in pair)

    def open(self) -> int:
        """Takes a free row, of length 0.

        Raises:
            RequestError: all rows are in use.
        """
        for row in range(self.num_rows):
            if row not in self._open:
                self._open.add(row)
                return row
        raise RequestError(
            f"all {self.num_rows} rows of the KV cache are in use",
            hint="wait until another answer is finished",
        )

    def reserve(self, row: int, num_tokens: int) -> None:
        """Makes sure that a row has blocks for its first `num_tokens` tokens, all kinds or none.

        Raises:
            RequestError: more tokens than the context holds, or too few free blocks.
        """
        assert row in self._open, row
        if num_tokens > self.context_tokens:
            raise RequestError(
                f"{num_tokens} tokens do not fit the context of {self.context_tokens}",
                hint="shorten the prompt, lower `max_tokens`, or load with a larger `--context`",
            )
        new = {window: self._missing(kind, row, num_tokens) for window, kind in self.kinds.items()}
        for window, num_new in new.items():
            num_free = self.kinds[window].allocator.num_free
            if num_new > num_free:
                raise RequestError(
                    f"the KV cache has {num_free} free blocks of {self.block_tokens} tokens, and "
                    f"a sequence of {num_tokens} tokens needs {num_new} more",
                    hint="wait until another answer is finished, or load with a larger `--context`",
                )
        for window, num_new in new.items():
            kind = self.kinds[window]
            owned = kind.num_owned[row]
            kind.table_RN[row, owned : owned + num_new] = kind.allocator.allocate(num_new)
            kind.num_owned[row] += num_new

    def grow(self, row: int, num_tokens: int) -> None:
        """A row is `num_tokens` longer; its blocks were reserved before."""
        length = self.lengths[row] + num_tokens
        for kind in self.kinds.values():
            assert self._missing(kind, row, length) == 0, (row, length)
        self.lengths[row] = length

    def close(self, row: int) -> None:
        """Gives a row and its blocks back. What was written stays until it is overwritten."""
        assert row in self._open, row
        for kind in self.kinds.values():
            kind.allocator.free(kind.table_RN[row, : kind.num_owned[row]].tolist())
            kind.table_RN[row], kind.num_owned[row] = 0, 0
        self.lengths[row] = 0
        self._open.remove(row)

    def _missing(self, kind: KVKind, row: int, num_tokens: int) -> int:
        needed = min(-(-num_tokens // self.block_tokens), kind.row_blocks)
        return max(0, needed - kind.num_owned[row])


def kv_pool_bytes(
    layers: Sequence[AttentionLayer],
    *,
    num_rows: int,
    context_tokens: int,
    element_bytes: int,
    block_tokens: int = BLOCK_TOKENS,
    full_tokens: int | None = None,
) -> int:
    """Bytes that the pools of a `KVPool` with these arguments take."""
    sizes = _num_blocks(layers, num_rows, context_tokens, block_tokens, full_tokens)
    return sum(
        sizes[layer.window][1]
        * block_tokens
        * layer.num_kv_heads
        * (layer.key_dim + layer.value_dim)
        * element_bytes
        for layer in layers
    )


def _num_blocks(
    layers: Sequence[AttentionLayer],
    num_rows: int,
    context_tokens: int,
    block_tokens: int,
    full_tokens: int | None,
) -> dict[int | None, tuple[int, int]]:
    """Window -> (most blocks of one row, blocks of all rows)."""
    whole = -(-context_tokens // block_tokens)
    sizes: dict[int | None, tuple[int, int]] = {}
    for layer in layers:
        if layer.window is not None:
            ring = min(whole, ring_blocks(layer.window, block_tokens))
            sizes[layer.window] = (ring, num_rows * ring)
        elif full_tokens is None:
            sizes[None] = (whole, num_rows * whole)
        else:
            sizes[None] = (whole, -(-full_tokens // block_tokens))
    return sizes


def _kind(window: int | None, num_rows: int, row_blocks: int, num_blocks: int) -> KVKind:
    table_RN = np.zeros((num_rows, row_blocks), dtype=np.int32)
    return KVKind(window, row_blocks, BlockAllocator(num_blocks), table_RN, [0] * num_rows)
