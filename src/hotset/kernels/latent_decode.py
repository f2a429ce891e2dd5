"""Decode attention in latent space (MLA) over a pool of blocks: every query head, one latent head.

    s_p  = scale * (q_latent . c_p + q_rope . r_p)
    out  = sum_p exp(s_p) c_p / (sum_p exp(s_p) + exp(sink))      the sink where there is one

c_p [R] is the latent of position p and its value at once, so that a tile of it is read once for
both; r_p [D] is the rotary part of the key. Cut along the context and summed as in
`attention_decode`; here the query heads are cut too, since all of them share what is read.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotset.kernels.attention_decode import (
    Launch,
    load_heads,
    most_splits,
    parts_of,
    slots_of,
    sum_splits,
    take_in,
)
from hotset.kernels.device import dot, is_interpreted

_LOG2_E = tl.constexpr(1.4426950408889634)
# Query heads of one program, by bytes of an element. Sums of 512 columns are 64 registers a thread
# then; of twice the heads some would spill (sm_90).
_MOST_ROWS = {2: 32, 4: 16}
# Bytes of latents in one tile: 16 positions of 512 in BF16. Two of them in flight beside 32 queries
# take 73 KiB of shared memory, of the 99 KiB that the smallest supported card has.
_TILE_BYTES = 16 * 1024
# Blocks of heads times splits: about two programs for each multiprocessor of a large card.
_PROGRAMS = 256
# A reducing program holds this many partial values.
_REDUCE_VALUES = 8 * 1024


def launch_shape(*, num_heads: int, rank: int, element_bytes: int, many: bool = False) -> Launch:
    """The launch of a shape; the same for every batch, length and capacity.

    `rows` are the query heads of one program.

    Args:
        many: rows are so many that none is cut.
    """
    rows = min(max(16, triton.next_power_of_2(num_heads)), _MOST_ROWS[element_bytes])
    splits = triton.next_power_of_2(_PROGRAMS // triton.cdiv(num_heads, rows))
    splits = 1 if many else min(max(splits, 16), 128)
    return Launch(
        tile=min(max(_TILE_BYTES // (_columns(rank) * element_bytes), 16), 64),
        splits=splits,
        rows=rows,
        reduce_columns=min(_REDUCE_VALUES // splits, _columns(rank)),
        warps=4 if rows == 16 else 8,
        stages=5 if element_bytes == 2 else 3,  # two tiles in flight, or one
    )


def _columns(width: int) -> int:
    """A width padded to what a tile takes: a power of two, at least the 16 of a tensor core."""
    return int(max(16, triton.next_power_of_2(width)))


@triton.jit
def _latent_kernel(
    q_BQR, q_BQD, latent_pool, rope_pool, block_table_BN, lengths_B, acc_BQSR, stats_BQS2,
    latent_row_stride, latent_head_stride, rope_row_stride, rope_head_stride, num_blocks, scale,
    NUM_HEADS: tl.constexpr, ROWS: tl.constexpr,
    RANK: tl.constexpr, ROPE_DIM: tl.constexpr, RANK_COLS: tl.constexpr, ROPE_COLS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    # Programs that read the same positions are neighbours, and find them in the L2 cache.
    split, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_B + row)
    _first, _first_tile, num_tiles, split_tiles = parts_of(length, 0, TILE, SPLITS)
    begin = split * split_tiles
    end = tl.minimum(begin + split_tiles, num_tiles)
    if begin >= end:
        return

    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = head < NUM_HEADS
    c, d = tl.arange(0, RANK_COLS), tl.arange(0, ROPE_COLS)
    latent_at = row * latent_row_stride + head[:, None] * latent_head_stride + c[None, :]
    rope_at = row * rope_row_stride + head[:, None] * rope_head_stride + d[None, :]
    q_latent = tl.load(q_BQR + latent_at, mask=real[:, None] & (c < RANK)[None, :], other=0.0)
    if ROPE_DIM > 0:
        q_rope = tl.load(q_BQD + rope_at, mask=real[:, None] & (d < ROPE_DIM)[None, :], other=0.0)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, RANK_COLS), tl.float32)
    table = block_table_BN + row * num_blocks
    for tile in range(begin, end):
        position = tile * TILE + tl.arange(0, TILE)
        inside = position < length
        slot = slots_of(table, position, inside, num_blocks, BLOCK_TOKENS, 0)
        latent = load_heads(latent_pool, slot, 0, inside, 1, RANK, RANK_COLS)
        s = dot(q_latent, tl.trans(latent), tl.zeros((ROWS, TILE), tl.float32), INTERPRET)
        if ROPE_DIM > 0:
            rope = load_heads(rope_pool, slot, 0, inside, 1, ROPE_DIM, ROPE_COLS)
            s = dot(q_rope, tl.trans(rope), s, INTERPRET)
        s = tl.where(inside[None, :], s * scale * _LOG2_E, float("-inf"))
        m, total, acc = take_in(s, latent, m, total, acc, INTERPRET)

    # [B, Hq, splits of the grid]; unused splits stay unwritten and are never read.
    at = (row * NUM_HEADS + head) * tl.num_programs(1) + split
    tl.store(stats_BQS2 + at * 2, m, mask=real)
    tl.store(stats_BQS2 + at * 2 + 1, total, mask=real)
    out = acc_BQSR + at[:, None] * RANK + c[None, :]
    tl.store(out, acc, mask=real[:, None] & (c < RANK)[None, :])


def decode_latents(
    q_BQR: torch.Tensor,
    q_BQD: torch.Tensor,
    latent_pool: torch.Tensor,
    rope_pool: torch.Tensor,
    block_table_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    sinks_Q: torch.Tensor | None = None,
    many: bool = False,
) -> torch.Tensor:
    """[B, Hq, R] in the dtype of `q_BQR`; see `attention.AttentionKernels.decode_latents`.

    Args:
        q_BQR, q_BQD: any strides but the last.
    """
    batch, num_heads, rank = q_BQR.shape
    block_tokens, rope_dim = latent_pool.shape[1], rope_pool.shape[-1]
    launch = launch_shape(
        num_heads=num_heads, rank=rank, element_bytes=q_BQR.element_size(), many=many
    )
    splits = most_splits(launch, block_table_BN.shape[1] * block_tokens, None)
    acc_BQSR = q_BQR.new_empty(batch, num_heads, splits, rank, dtype=torch.float32)
    stats_BQS2 = q_BQR.new_empty(batch, num_heads, splits, 2, dtype=torch.float32)
    out_BQR = q_BQR.new_empty(batch, num_heads, rank)
    _latent_kernel[(triton.cdiv(num_heads, launch.rows), splits, batch)](
        *(q_BQR, q_BQD, latent_pool, rope_pool, block_table_BN, lengths_B),
        *(acc_BQSR, stats_BQS2),
        *q_BQR.stride()[:2],
        *q_BQD.stride()[:2],
        *(block_table_BN.shape[1], scale),
        NUM_HEADS=num_heads,
        ROWS=launch.rows,
        RANK=rank,
        ROPE_DIM=rope_dim,
        RANK_COLS=_columns(rank),
        ROPE_COLS=_columns(rope_dim),
        BLOCK_TOKENS=block_tokens,
        TILE=launch.tile,
        SPLITS=launch.splits,
        INTERPRET=is_interpreted(_latent_kernel),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    sum_splits(acc_BQSR, stats_BQS2, lengths_B, out_BQR, launch=launch, sinks_Q=sinks_Q)
    return out_BQR
