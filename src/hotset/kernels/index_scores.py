"""Scores of an indexer (DeepSeek Sparse Attention) over a pool of blocks: one Triton launch.

    score[n, p] = sum_h w[n, h] relu(q[n, h] . k_p)      p < count[n], otherwise -inf

One program for each (tile of candidates, query): its heads are the rows of one product. Programs
without candidates only write; a score's bits depend on its query, its candidate and shapes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotset.kernels.attention_decode import load_heads, slots_of
from hotset.kernels.device import dot, is_interpreted

# Candidates of one program: 64 keys of 128 in BF16 are 16 KiB, loaded at once.
_TILE = 64


@triton.jit
def _index_kernel(
    q_NHD, weights_NH, key_pool, table_RN, counts_N, out_NP,
    query_stride, head_stride, table_stride, num_blocks, num_columns,
    NUM_HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, TILE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    tile, query = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(counts_N + query)
    position = tile * TILE + tl.arange(0, TILE)
    out = out_NP + query * num_columns + position
    inside = position < count
    if tile * TILE >= count:
        tl.store(out, tl.full((TILE,), float("-inf"), tl.float32), mask=position < num_columns)
        return

    table = table_RN + query * table_stride
    slot = slots_of(table, position, inside, num_blocks, BLOCK_KEYS, 0)
    keys = load_heads(key_pool, slot, 0, inside, 1, DIM, COLS)
    head, d = tl.arange(0, ROWS), tl.arange(0, COLS)
    real = head < NUM_HEADS
    at = query * query_stride + head[:, None] * head_stride + d[None, :]
    q = tl.load(q_NHD + at, mask=real[:, None] & (d < DIM)[None, :], other=0.0)
    products = dot(q, tl.trans(keys), tl.zeros((ROWS, TILE), tl.float32), INTERPRET)
    weight = tl.load(weights_NH + query * NUM_HEADS + head, mask=real, other=0.0)
    score = tl.sum(weight[:, None] * tl.maximum(products, 0.0), 0)
    tl.store(out, tl.where(inside, score, float("-inf")), mask=position < num_columns)


def index_scores(
    q_NHD: torch.Tensor,
    weights_NH: torch.Tensor,
    key_pool: torch.Tensor,
    table_RN: torch.Tensor,
    counts_N: torch.Tensor,
) -> torch.Tensor:
    """FP32 [N, P]; see `attention.AttentionKernels.index_scores`."""
    (num_queries, num_heads, dim), block_keys = q_NHD.shape, key_pool.shape[1]
    num_blocks = table_RN.shape[1]
    out_NP = q_NHD.new_empty(num_queries, num_blocks * block_keys, dtype=torch.float32)
    _index_kernel[(triton.cdiv(out_NP.shape[1], _TILE), num_queries)](
        *(q_NHD, weights_NH, key_pool, table_RN, counts_N, out_NP),
        *q_NHD.stride()[:2],
        *(0 if len(table_RN) == 1 else table_RN.stride(0), num_blocks, out_NP.shape[1]),
        NUM_HEADS=num_heads,
        ROWS=max(16, triton.next_power_of_2(num_heads)),
        DIM=dim,
        COLS=max(16, triton.next_power_of_2(dim)),
        BLOCK_KEYS=block_keys,
        TILE=_TILE,
        INTERPRET=is_interpreted(_index_kernel),
        num_warps=4,
    )
    return out_NP
