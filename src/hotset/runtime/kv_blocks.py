"""Block ids of a KV pool: who holds each, and which may be found again by the tokens in it.

A block that is full never changes, so rows that begin alike hold the same ones. Nobody's blocks
stay as they are, by name, until their room is needed: the one that was let go of first goes first.
Knows ids and names; what lies in a block, and on which device, is `kv_pool`'s business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice

import numpy as np

# Of a name. Two texts share one with a probability of 2^-128 a pair, which is never.
_NAME_BYTES = 16


class BlockAllocator:
    """Hands out block ids 0 .. num_blocks - 1; what was freed last goes first, then what is kept
    by name, the oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders: Counter[int] = Counter()  # no entry for a block that nobody holds
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._kept: dict[int, None] = {}  # named, held by nobody; in the order of letting go

    @property
    def num_free(self) -> int:
        """Blocks that may be allocated, those kept by name among them."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        return len(self._holders)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks. The caller has looked that there are enough."""
        assert 0 <= num_blocks <= self.num_free, (num_blocks, self.num_free)
        blocks = [self._free.pop() for _ in range(min(num_blocks, len(self._free)))]
        for block in list(islice(self._kept, num_blocks - len(blocks))):
            del self._kept[block]
            del self._named[self._names.pop(block)]
            blocks.append(block)
        self._holders.update(blocks)
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder for named blocks."""
        for block in blocks:
            assert block in self._names, block
            self._kept.pop(block, None)
            self._holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """A holder lets go of blocks, each once; the last in the list counts as the oldest."""
        assert all(block in self._holders for block in blocks), blocks
        assert len(set(blocks)) == len(blocks), blocks
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._names:
                self._kept[block] = None
            else:
                self._free.append(block)

    def name(self, block: int, name: bytes) -> None:
        """A held block may be found by this name. The first of several of one name is."""
        assert block in self._holders, block
        if name not in self._named and block not in self._names:
            self._names[block], self._named[name] = name, block

    def find(self, name: bytes) -> int | None:
        return self._named.get(name)

    def num_kept(self, blocks: Sequence[int]) -> int:
        """How many of these nobody holds."""
        return sum(block in self._kept for block in blocks)


class PrefixIndex:
    """Blocks by the tokens of their grain and all before: a name is the hash of a grain's ids and
    of the name before it, and the block's place in the grain. So what is found of a grain was
    computed with all of its tokens, in one row's forwards or in others with the same tokens: a
    block of another text, though it began alike, had other tokens beside it and has other low bits.

    Args:
        allocator: of blocks of full attention.
        block_tokens: tokens of a block.
        grain_tokens: prefixes are reused in whole multiples of this, itself whole blocks.
    """

    def __init__(self, allocator: BlockAllocator, *, block_tokens: int, grain_tokens: int) -> None:
        assert grain_tokens > 0 and grain_tokens % block_tokens == 0
        self._allocator = allocator
        self._grain_tokens, self._grain_blocks = grain_tokens, grain_tokens // block_tokens

    def find(self, ids: Sequence[int]) -> list[int]:
        """Blocks of the longest known prefix. At least one id is left over: its logits are what a
        prompt is taken in for."""
        blocks: list[int] = []
        for name in self._chain(ids[: len(ids) - 1]):
            block = self._allocator.find(name)
            if block is None:
                break
            blocks.append(block)
        return blocks[: len(blocks) // self._grain_blocks * self._grain_blocks]

    def keep(self, ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Names the full blocks of a row, of its first tokens in order; whole grains only."""
        for block, name in zip(blocks, self._chain(ids), strict=False):
            self._allocator.name(block, name)

    def _chain(self, ids: Sequence[int]) -> Iterator[bytes]:
        """Names of the blocks of all whole grains."""
        size, name = self._grain_tokens, b""
        for end in range(size, len(ids) + 1, size):
            part = np.asarray(ids[end - size : end], dtype=np.int64).tobytes()
            name = blake2b(name + part, digest_size=_NAME_BYTES).digest()
            for place in range(self._grain_blocks):
                yield name + place.to_bytes(4)
