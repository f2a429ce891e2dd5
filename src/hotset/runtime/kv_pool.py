"""The KV cache's memory: blocks of tokens per layer, and which sequence owns which block.

A *row* is one sequence. Layers of one kind (full attention, or one sliding window) share block
ids: block 7 of a row is block 7 in each of them. A row of a window owns a ring of blocks that is
reused, one of full attention as many as it is long, and what a layer carries in a state of fixed
size has its place in `state_rows`. Where a layer keeps latents they lie where others have keys, and
their rotary parts where others have values; what an indexer keeps lies in `index_pool`. A row that
is opened with a promise gets its blocks whenever it needs them: more is never promised than there
is, so nothing is evicted in the middle of an answer. Ownership and lengths live on the host, as
plain numbers; what a step needs of them on the device, the step has (`kv_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hotset.core.errors import RequestError
from hotset.core.geometry import AttentionLayer, StateLayer
from hotset.core.kv_dtype import kept_bytes
from hotset.kernels.attention import ring_blocks
from hotset.kernels.kv_fp8 import E4M3_NAN
from hotset.runtime.index_pool import BlocksOf, IndexPool, index_pool_bytes
from hotset.runtime.kv_blocks import BlockAllocator, PrefixIndex
from hotset.runtime.state_rows import StateRows

# Tokens of a block. A row wastes half a block on average, and a ring up to one block and what
# rounding adds (a window of 128: 160 tokens with blocks of 32, 192 with 64), which speaks for
# small ones; the table of a 128k context still has only 4,096 entries, and a block of one layer
# is tens of KiB, far more than a memory transaction.
BLOCK_TOKENS = 32


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
        layers, states: what `find_attention` found.
        num_rows: sequences at a time.
        context_tokens: most tokens of one of them.
        dtype: of keys and values.
        device: of the pools.
        fp8: keep them in eight bits (`kernels.kv_fp8`); no layer may keep latents.
        block_tokens: tokens of a block.
        full_tokens: tokens of all rows together that full attention has room for; default
            `num_rows * context_tokens`, with which no admitted row can run out of blocks.
        prefix_grain: reuse blocks of equal prefixes in whole multiples of so many tokens; `None`
            reuses none. A ring has lost what it held, and a state what it was before, so all
            layers must be of full attention.
        num_places: most places of a decode step.
        poison: fill the pools with NaN, so that reading what was not written shows.
    """

    def __init__(  # noqa: PLR0913 - sizes of a pool, once
        self,
        layers: Sequence[AttentionLayer],
        states: Sequence[StateLayer] = (),
        *,
        num_rows: int,
        context_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        num_places: int = 1,
        block_tokens: int = BLOCK_TOKENS,
        full_tokens: int | None = None,
        prefix_grain: int | None = None,
        fp8: bool = False,
        poison: bool = False,
    ) -> None:
        assert layers and num_rows > 0 and context_tokens > 0 and block_tokens > 0
        self.layers = {layer.index: layer for layer in layers}
        self.num_rows, self.context_tokens = num_rows, context_tokens
        self.block_tokens, self.device, self.dtype = block_tokens, device, dtype
        sizes = _num_blocks(layers, num_rows, context_tokens, block_tokens, full_tokens)
        self.kinds = {window: _kind(window, num_rows, *sizes[window]) for window in sizes}
        self.pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.exponents: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}
        for layer in layers:
            num_heads, *widths = layer.cached
            assert not (fp8 and layer.latent)
            shape = (sizes[layer.window][1], block_tokens, num_heads)
            kept = torch.uint8 if fp8 else dtype
            keys, values = (
                torch.empty(*shape, width, dtype=kept, device=device) for width in widths
            )
            self.pools[layer.index] = keys, values
            self.exponents[layer.index] = None
            if fp8:
                powers = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2)]
                self.exponents[layer.index] = powers[0], powers[1]
            if poison:
                keys.fill_(E4M3_NAN if fp8 else torch.nan)
                values.fill_(E4M3_NAN if fp8 else torch.nan)
        _, num_blocks = sizes.get(None, (0, 0))
        of_pool = BlocksOf(num_blocks, block_tokens, num_rows, dtype, device)
        self.indices = {
            layer.index: IndexPool(layer.indexer, of_pool, poison=poison)
            for layer in layers
            if layer.indexer is not None
        }
        self.states = StateRows(
            states, num_rows=num_rows, num_places=num_places, device=device, poison=poison
        )
        self.lengths = [0] * num_rows
        self._open: dict[int, int] = {}  # row -> blocks of full attention that it may come to own
        self.prefixes: PrefixIndex | None = None
        if prefix_grain is not None:
            assert set(self.kinds) == {None} and not states, "neither rings nor states are shared"
            self.prefixes = PrefixIndex(
                self.kinds[None].allocator, block_tokens=block_tokens, grain_tokens=prefix_grain
            )

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values; equal to what `kv_pool_bytes` says beforehand."""
        pairs = [*self.pools.values(), *(pair for pair in self.exponents.values() if pair)]
        indices = sum(index.nbytes for index in self.indices.values())
        return sum(tensor.nbytes for pair in pairs for tensor in pair) + indices

    @property
    def num_full_blocks(self) -> tuple[int, int]:
        """Blocks of full attention, and those that rows hold."""
        if None not in self.kinds:
            return 0, 0
        allocator = self.kinds[None].allocator
        return allocator.num_free + allocator.num_used, allocator.num_used

    def has_room(self, num_tokens: int, shared: Sequence[int] = ()) -> bool:
        """Whether a row of that length may be opened: a row is free, and so many blocks of full
        attention are neither in use nor promised.

        Args:
            num_tokens: the longest that the row will be.
            shared: blocks that it will begin with, as `prefixes.find` gave them.
        """
        if len(self._open) == self.num_rows:
            return False
        if None not in self.kinds:
            return True
        kind = self.kinds[None]
        promised = sum(max(0, most - kind.num_owned[row]) for row, most in self._open.items())
        # Kept blocks count as free until a row begins with them.
        num_free = kind.allocator.num_free - kind.allocator.num_kept(shared) - promised
        return self._num_blocks(kind, num_tokens) - len(shared) <= num_free

    def open(self, num_tokens: int = 0, shared: Sequence[int] = ()) -> int:
        """Takes a free row, as long as what it shares.

        Args:
            num_tokens: promised length: so long it may become, whatever other rows need.
            shared: blocks of full attention that it begins with.

        Raises:
            RequestError: all rows are in use.
        """
        row = next((row for row in range(self.num_rows) if row not in self._open), None)
        if row is None:
            raise RequestError(
                f"all {self.num_rows} rows of the KV cache are in use",
                hint="wait until another answer is finished",
            )
        assert not num_tokens or self.has_room(num_tokens, shared), (num_tokens, len(shared))
        full = self.kinds.get(None)
        self._open[row] = 0 if full is None else self._num_blocks(full, num_tokens)
        if shared:
            assert full is not None
            full.allocator.hold(shared)
            full.table_RN[row, : len(shared)], full.num_owned[row] = shared, len(shared)
            self.lengths[row] = len(shared) * self.block_tokens
        return row

    def keep(self, row: int, ids: Sequence[int]) -> None:
        """Lets later rows that begin with the same ids begin with this row's full blocks.

        Args:
            ids: of the row's first tokens, not more than it has keys and values of.
        """
        assert len(ids) <= self.lengths[row], (len(ids), self.lengths[row])
        if self.prefixes is not None:
            kind = self.kinds[None]
            self.prefixes.keep(ids, kind.table_RN[row, : kind.num_owned[row]].tolist())

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
        """Gives a row and its blocks back. What was written stays until it is overwritten, and what
        was kept until its room is needed."""
        assert row in self._open, row
        for kind in self.kinds.values():
            kind.allocator.free(kind.table_RN[row, : kind.num_owned[row]].tolist())
            kind.table_RN[row], kind.num_owned[row] = 0, 0
        self.lengths[row] = 0
        self.states.close(row)
        del self._open[row]

    def _missing(self, kind: KVKind, row: int, num_tokens: int) -> int:
        return max(0, self._num_blocks(kind, num_tokens) - kind.num_owned[row])

    def _num_blocks(self, kind: KVKind, num_tokens: int) -> int:
        return min(-(-num_tokens // self.block_tokens), kind.row_blocks)


def as_tokens(pool: torch.Tensor) -> torch.Tensor:
    """A pool's blocks as blocks of one token, for a table of chosen tokens."""
    return pool.flatten(0, 1)[:, None]


def kv_pool_bytes(
    layers: Sequence[AttentionLayer],
    *,
    num_rows: int,
    context_tokens: int,
    element_bytes: int,
    block_tokens: int = BLOCK_TOKENS,
    full_tokens: int | None = None,
    fp8: bool = False,
) -> int:
    """Bytes that keys and values of a `KVPool` with these arguments take, and keys of indexers."""
    sizes = _num_blocks(layers, num_rows, context_tokens, block_tokens, full_tokens)
    total = sum(
        sizes[layer.window][1] * block_tokens * kept_bytes(layer, element_bytes, fp8=fp8)
        for layer in layers
    )
    return total + index_pool_bytes(
        layers,
        num_blocks=sizes[None][1] if None in sizes else 0,
        block_tokens=block_tokens,
        num_rows=num_rows,
        element_bytes=element_bytes,
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
