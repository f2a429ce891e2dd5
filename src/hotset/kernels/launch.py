"""Launch shapes of the expert kernels: one table for each, keyed by element size and token block.

All choices depend on shapes, dtype and device only, so that bits never depend on where a record
lies. Whatever orders a reduction (`cols`) is a constant of the table; nothing is autotuned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

# Shared memory that every supported card grants to one block (sm_86, sm_89, sm_120: 99 KiB).
_SMALLEST_SHARED_BYTES = 99 * 1024
# Above this many tokens for each expert on average, blocks of 128 tokens waste less than they win.
_MEAN_TOKENS_FOR_128 = 48


@dataclass(frozen=True)
class Tile:
    """One launch shape.

    Attributes:
        rows: weight rows of a tile; with a gate, half of them are gate rows.
        cols: columns of one step along the reduction.
        warps: warps of a program.
        stages: steps in flight, of plain one-token kernels before the wait for the previous kernel
            too; it cannot change a bit.
        group: token blocks that neighbouring programs share a weight tile across (L2 reuse).
    """

    rows: int
    cols: int
    warps: int
    stages: int
    group: int = 1


# One token, FMA, by bytes of an element. 2-byte rows measured on an H200 (H 2048, I 768, BF16,
# match and combine included): 1.00 of the link's speed of light as every tile tried. Of the second
# projection with every expert in a slot, in us a layer: 4 x 256 with 3 steps 23.3, 8 x 256 23.4,
# 8 x 128 with 6 23.6, 16 x 128 with 1 23.9. Two steps of the first in flight cost 0.9.
ONE_TOKEN_UP = {2: Tile(4, 1024, 4, 1), 4: Tile(8, 256, 4, 3)}
ONE_TOKEN_DOWN = {2: Tile(4, 256, 4, 3), 4: Tile(8, 128, 4, 3)}

# One token and codes: by codes of a word. `stages` are the steps that are read before the first one
# is computed on. Columns are parts of a row, 16 words each, 8 at most (`packed_rows`); with fewer a
# tile has as many rows more.
ONE_TOKEN_UP_PACKED = {8: Tile(16, 1024, 4, 2), 4: Tile(8, 512, 4, 4)}
ONE_TOKEN_DOWN_PACKED = {8: Tile(32, 256, 4, 3), 4: Tile(16, 256, 4, 3)}
# Of a row's steps at most this share may lie beyond its end: lanes without work.
_MOST_WASTE = 1 / 4
_PART_WORDS = 16

# Many tokens, by (bytes of an element, tokens of a block). Up to 64 tokens it is the reading of
# weights that takes time: narrow tiles, many programs, 256-byte row pieces. FP32 is IEEE, which
# has no tensor core, so small tiles keep it in registers. Of two tiles the second is for cards
# whose shared memory holds fewer than `_MIN_STAGES` steps of the first.
GROUPED = {
    (2, 16): (Tile(64, 128, 4, 4),),
    (2, 32): (Tile(64, 128, 4, 4),),
    (2, 64): (Tile(128, 64, 4, 4, group=4),),
    (2, 128): (Tile(256, 64, 8, 4, group=8), Tile(128, 64, 8, 3, group=8)),
    (4, 16): (Tile(32, 32, 4, 2),),
    (4, 32): (Tile(32, 32, 4, 2),),
    (4, 64): (Tile(64, 16, 4, 2, group=4),),
    (4, 128): (Tile(64, 16, 8, 2, group=8),),
}
_MIN_STAGES = 3

# Many tokens and codes, by (bytes of an element, tokens of a block) and codes of a word: steps of
# whole 128-byte lines of codes, while weights of one step fit shared memory beside the inputs of
# several. Prompts run over dequantised records; the block of 128 is for whoever does not.
GROUPED_PACKED = {
    (2, 16): {8: Tile(64, 256, 4, 3), 4: Tile(64, 128, 4, 4)},
    (2, 32): {8: Tile(64, 256, 4, 3), 4: Tile(64, 128, 4, 4)},
    (2, 64): {8: Tile(64, 128, 4, 3, group=4), 4: Tile(64, 128, 4, 3, group=4)},
    (2, 128): {8: Tile(64, 128, 8, 3, group=8), 4: Tile(64, 128, 8, 3, group=8)},
    (4, 16): {8: Tile(32, 32, 4, 2), 4: Tile(32, 32, 4, 2)},
    (4, 32): {8: Tile(32, 32, 4, 2), 4: Tile(32, 32, 4, 2)},
    (4, 64): {8: Tile(64, 16, 4, 2, group=4), 4: Tile(64, 16, 4, 2, group=4)},
    (4, 128): {8: Tile(64, 16, 8, 2, group=8), 4: Tile(64, 16, 8, 2, group=8)},
}


# Dequantising whole records, by codes of a word: each step reads 128 bytes of a row or more. What
# it computes does not depend on the tile.
DEQUANTISE = {8: Tile(16, 512, 4, 2), 4: Tile(16, 256, 4, 2), 1: Tile(16, 256, 4, 2)}


def token_block(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Tokens in one block of the grouped kernels: 16, 32, 64 or 128.

    An expert has at most `num_tokens` tokens (unless ids repeat within a row), so up to 64 tokens
    a block holds all tokens of an expert and its weights are read once.
    """
    if num_tokens <= 64:
        return max(16, 1 << (num_tokens - 1).bit_length())
    return 128 if num_tokens * top_k > _MEAN_TOKENS_FOR_128 * num_experts else 64


def packed_one_token_tile(tile: Tile, columns: int, per_word: int) -> Tile:
    """The tile with fewer columns where much of a row's last step would lie beyond its end.

    Args:
        tile: of `ONE_TOKEN_UP_PACKED` or `ONE_TOKEN_DOWN_PACKED`.
        columns: K of the matrix.
        per_word: codes of a 32-bit word.
    """
    rows, cols = tile.rows, tile.cols
    while cols > _PART_WORDS * per_word and -columns % cols > _MOST_WASTE * columns:
        rows, cols = rows * 2, cols // 2
    return replace(tile, rows=rows, cols=cols)


def grouped_tile(
    element_bytes: int,
    block_tokens: int,
    shared_bytes: int,
    *,
    per_word: int = 1,
    fill: bool = False,
) -> Tile:
    """The table's tile that fits a block's shared memory, with the stages that fit.

    Args:
        element_bytes: of the compute dtype.
        block_tokens: tokens of a block.
        shared_bytes: shared memory of a block.
        per_word: codes of a 32-bit word; 1 where weights are plain.
        fill: weights are also stored.
    """
    if per_word > 1:
        tile = _synchronous(GROUPED_PACKED[element_bytes, block_tokens][per_word], block_tokens)
        # Of each stage inputs and codes; of one the weights that were made of them.
        step_bytes = (
            block_tokens * tile.cols * element_bytes + tile.rows * tile.cols * 4 // per_word
        )
        weights_bytes = tile.rows * tile.cols * element_bytes
        stages = min(tile.stages, (shared_bytes - weights_bytes) // step_bytes)
        return replace(tile, stages=max(1, stages))
    tiles = GROUPED[element_bytes, block_tokens]
    if fill:
        tiles = tuple(_synchronous(tile, block_tokens) for tile in tiles)
    for tile in tiles:
        step_bytes = (block_tokens + tile.rows) * tile.cols * element_bytes
        stages = min(tile.stages, shared_bytes // step_bytes)
        if stages >= min(tile.stages, _MIN_STAGES) or tile is tiles[-1]:
            break
    return replace(tile, stages=max(1, stages))


def resident_programs(tile: Tile, element_bytes: int, block_tokens: int, shared_bytes: int) -> int:
    """Programs of a grouped kernel that a processor runs at a time, as far as shared memory and
    registers (for 8 warps that use all they may) go; at least 1.

    Args:
        shared_bytes: shared memory of a processor.
    """
    step_bytes = (block_tokens + tile.rows) * tile.cols * element_bytes
    return max(1, min(shared_bytes // (tile.stages * step_bytes), 8 // tile.warps))


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that one block of `device` may use (the interpreter has no limit)."""
    if device.type != "cuda":
        return _SMALLEST_SHARED_BYTES
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


def _synchronous(tile: Tile, block_tokens: int) -> Tile:
    """A tile that no asynchronous tensor core instruction (wgmma) takes: those want four warps and
    64 tokens.

    Two errors of Triton 3.6 and 3.7 on sm_90 make that necessary. Weights that are used in a second
    way, here to fill a slot, get a buffer less than stages, and the copy of a later step overwrites
    what such an instruction still reads (seen on an H200: other sums with 64 tokens). And blocks
    of 64 tokens and more with weights that are made in registers do not compile.
    """
    return replace(tile, rows=min(tile.rows, 64), warps=2) if block_tokens >= 64 else tile
