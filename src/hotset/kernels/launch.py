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
        tiles: tiles that a program takes in turn, the next one's first weights in flight.
        registers: of a thread at most, `None` for what the compiler takes.
        stride: rows of a tile are so many apart (`packed.Matrix.line_period`).
    """

    rows: int
    cols: int
    warps: int
    stages: int
    group: int = 1
    tiles: int = 1
    registers: int | None = None
    stride: int = 1


# One token, FMA, by bytes of an element. 2-byte rows measured on an H200 (H 2048, I 768, BF16,
# match and combine included): 1.00 of the link's speed of light as every tile tried. Of the second
# projection with every expert in a slot, in us a layer: one tile a program 23.2, two 22.8, four
# 22.4.
# With 64 registers a thread eight programs of the first fit a processor: 23.6, else 24.3.
ONE_TOKEN_UP = {2: Tile(4, 1024, 4, 1, registers=64), 4: Tile(8, 256, 4, 3)}
ONE_TOKEN_DOWN = {2: Tile(4, 256, 4, 3, tiles=4), 4: Tile(8, 128, 4, 3)}
# What these shapes were measured with, and what compiles without a spill for sm_90: whole steps of
# a row up to so many, and so many steps of a program. They are laid out one by one, so that longer
# ones take registers that other programs would have.
_FEW_STEPS = 2
_MOST_STEPS = 12

# One token and codes: by codes of a word. `stages` are the steps that are read before the first one
# is computed on. Columns are parts of a row, 16 words each, 8 at most (`packed_rows`); with fewer a
# tile has as many rows more. Measured as above: FP8 19.4 with 4 steps, 18.7 with 2; NVFP4 19.8 with
# 2, 18.0 with 1. Twice the rows are for codes that are multiplied as they are (INT4 14.9 and 14.2,
# MXFP4 15.5 and 15.2; NVFP4 22.2), in short rows, where threads have the registers.
ONE_TOKEN_UP_PACKED = {8: Tile(16, 1024, 4, 1), 4: Tile(8, 512, 4, 2)}
ONE_TOKEN_UP_SHORT = Tile(32, 1024, 4, 1)
ONE_TOKEN_DOWN_PACKED = {8: Tile(32, 256, 4, 3), 4: Tile(16, 256, 4, 3)}
# Of a row's steps at most this share may lie beyond its end: lanes without work.
_MOST_WASTE = 1 / 4
_PART_WORDS = 16
_LINE_WORDS = 32

# Two to eight tokens of plain experts (`moe_few`), each program with all pairs in sight. A thread
# holds so many bytes of weights, in steps of 16, and FP32 sums of so many rows. Measured on an H200
# (H 2048, I 768, BF16, routing of real text, in us a layer of 2, 4 and 8 tokens): 41.1, 71.4 and
# 120.2; with half the bytes 39.7, 71.6, 126.9, with a quarter 42.3, 77.7, 149.7; in programs of one
# warp 41.4, 72.7, 129.7, of eight 42.7, 74.6, 132.4; grouped (`moe_grouped`) 82.7, 143.3, 211.3.
_FEW_TOKENS, _FEW_PAIRS = 8, 128
_HELD_WARPS, _HELD_BYTES, _HELD_STEPS, _HELD_ROWS = 4, 256, 8, 4

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


def plain_one_token_tile(tile: Tile, rows: int, columns: int) -> Tile:
    """The tile, its limit of registers and its many tiles only for shapes that they suit.

    Args:
        tile: of `ONE_TOKEN_UP` or `ONE_TOKEN_DOWN`.
        rows, columns: of the matrix; rows of a half where a gate makes two.
    """
    whole = columns % tile.cols == 0 and rows % (tile.rows * tile.tiles) == 0
    steps = columns // tile.cols
    return replace(
        tile,
        tiles=tile.tiles if whole and tile.tiles * steps <= _MOST_STEPS else 1,
        registers=tile.registers if whole and steps <= _FEW_STEPS else None,
    )


def is_few(num_tokens: int, top_k: int, element_bytes: int, longest: int) -> bool:
    """Whether `moe_few` takes so many tokens of plain experts.

    Args:
        longest: columns of the matrix that has more.
    """
    most_columns = _HELD_STEPS * _HELD_WARPS * _warp_columns(element_bytes)
    pairs = num_tokens * top_k
    return 1 < num_tokens <= _FEW_TOKENS and pairs <= _FEW_PAIRS and longest <= most_columns


def few_tokens_tile(element_bytes: int, rows: int, columns: int, *, halves: int = 1) -> Tile:
    """A tile of whole rows: each is one warp's; long ones are two or four warps' together.

    Args:
        rows: of a half.
        columns: of the matrix.
        halves: 2 where a gate makes two; a tile then has as many rows of each.
    """
    lanes = _warp_columns(element_bytes)
    cols = lanes
    while cols < _HELD_WARPS * lanes and columns > _HELD_STEPS * cols:
        cols *= 2
    steps, at_once = -(-columns // cols), _HELD_WARPS * lanes // cols
    most = min(_HELD_ROWS, _HELD_BYTES // (steps * 16)) * at_once
    units = at_once
    while 2 * units * halves <= most and units < rows:
        units *= 2
    return Tile(units * halves, cols, _HELD_WARPS, steps)


def _warp_columns(element_bytes: int) -> int:
    """Weights of a row that a warp reads at once, 16 bytes a lane."""
    return 32 * 16 // element_bytes


def packed_one_token_tile(
    name: str, columns: int, per_word: int, *, light: bool, period: int = 1
) -> Tile:
    """The table's tile, with fewer columns where much of a last step would lie beyond a row's end.

    Rows that do not begin on a line are read in whole lines all the same: a tile takes those that
    begin at the same place of one, and its steps begin before them. Where that would take a step
    more, lines are cut.

    Args:
        name: `up` or `down`.
        columns: K of the matrix.
        per_word: codes of a 32-bit word.
        light: codes are multiplied by scales that BF16 holds, and have no zero points.
        period: rows from one that begins at some place of a line to the next that does.
    """
    tile = (ONE_TOKEN_UP_PACKED if name == "up" else ONE_TOKEN_DOWN_PACKED)[per_word]
    short = columns % tile.cols == 0 and columns <= _FEW_STEPS * tile.cols
    if name == "up" and per_word == 8 and light and short:
        tile = ONE_TOKEN_UP_SHORT
    rows, cols = tile.rows, tile.cols
    while cols > _PART_WORDS * per_word and -columns % cols > _MOST_WASTE * columns:
        rows, cols = rows * 2, cols // 2
    before = (_LINE_WORDS - _LINE_WORDS // period) * per_word  # columns, at most
    stride = period if -columns % cols >= before else 1
    return replace(tile, rows=rows, cols=cols, stride=stride)


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
