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
        stages: steps in flight; it cannot change a bit.
        group: token blocks that neighbouring programs share a weight tile across (L2 reuse).
    """

    rows: int
    cols: int
    warps: int
    stages: int
    group: int = 1


# One token, FMA, by bytes of an element: rows read whole, 1 KiB and 512 B at a time. 2-byte rows
# measured on an H200 (H 2048, I 768, BF16): 1.00 of the link's speed of light; twice the rows or
# twice the columns were slower.
ONE_TOKEN_UP = {2: Tile(8, 512, 4, 3), 4: Tile(8, 256, 4, 3)}
ONE_TOKEN_DOWN = {2: Tile(8, 256, 4, 3), 4: Tile(8, 128, 4, 3)}

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


def token_block(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Tokens in one block of the grouped kernels: 16, 32, 64 or 128.

    An expert has at most `num_tokens` tokens (unless ids repeat within a row), so up to 64 tokens
    a block holds all tokens of an expert and its weights are read once.
    """
    if num_tokens <= 64:
        return max(16, 1 << (num_tokens - 1).bit_length())
    return 128 if num_tokens * top_k > _MEAN_TOKENS_FOR_128 * num_experts else 64


def grouped_tile(element_bytes: int, block_tokens: int, shared_bytes: int) -> Tile:
    """The table's tile that fits a block's shared memory, with the stages that fit."""
    tiles = GROUPED[element_bytes, block_tokens]
    for tile in tiles:
        step_bytes = (block_tokens + tile.rows) * tile.cols * element_bytes
        stages = min(tile.stages, shared_bytes // step_bytes)
        if stages >= min(tile.stages, _MIN_STAGES) or tile is tiles[-1]:
            break
    return replace(tile, stages=max(1, stages))


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that one block of `device` may use (the interpreter has no limit)."""
    if device.type != "cuda":
        return _SMALLEST_SHARED_BYTES
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])
