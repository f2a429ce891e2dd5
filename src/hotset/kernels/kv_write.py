"""Writes new keys and values into their blocks, both in one launch.

Token t of T new ones of a row is position length - T + t; it goes to block
block_table[b, (position // block_tokens) % N]. Knows blocks, not sequences: padded rows (length 0)
write nothing, and where a ring of N blocks is shorter than what is new, only the last round stays.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotset.kernels.dependent import dependent_launch, wait_for_previous


@triton.jit
def _copy_heads(
    source,
    target,
    head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: [HEADS, DIM] with any head stride to contiguous."""
    element = tl.arange(0, BLOCK)
    real = element < HEADS * DIM
    at = (element // DIM) * head_stride + element % DIM
    tl.store(target + element, tl.load(source + at, mask=real), mask=real)


@triton.jit
def _write_kernel(
    k_BTHD,
    v_BTHD,
    k_pool,
    v_pool,
    block_table_BN,
    lengths_B,
    k_row_stride,
    k_token_stride,
    k_head_stride,
    v_row_stride,
    v_token_stride,
    v_head_stride,
    num_blocks,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_B + row)
    position = length - tl.num_programs(0) + tl.program_id(0)
    if (position < 0) | (length <= 0) | (position < length - num_blocks * BLOCK_TOKENS):
        return
    entry = (position // BLOCK_TOKENS) % num_blocks
    block = tl.load(block_table_BN + row * num_blocks + entry).to(tl.int64)
    slot = block * BLOCK_TOKENS + position % BLOCK_TOKENS
    k = k_BTHD + row * k_row_stride + token * k_token_stride
    v = v_BTHD + row * v_row_stride + token * v_token_stride
    _copy_heads(k, k_pool + slot * (HEADS * KEY_DIM), k_head_stride, HEADS, KEY_DIM, KEY_BLOCK)
    _copy_heads(
        v, v_pool + slot * (HEADS * VALUE_DIM), v_head_stride, HEADS, VALUE_DIM, VALUE_BLOCK
    )


def write_kv(
    k_BTHD: torch.Tensor,
    v_BTHD: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table_BN: torch.Tensor,
    lengths_B: torch.Tensor,
) -> None:
    """Writes T new tokens of every row into the pools; see `attention.AttentionKernels.write`.

    Args:
        k_BTHD, v_BTHD: any strides but the last.
        k_pool, v_pool: contiguous.
    """
    batch, num_new, num_heads, key_dim = k_BTHD.shape
    value_dim = v_BTHD.shape[-1]
    _write_kernel[(num_new, batch)](
        k_BTHD,
        v_BTHD,
        k_pool,
        v_pool,
        block_table_BN,
        lengths_B,
        *k_BTHD.stride()[:3],
        *v_BTHD.stride()[:3],
        block_table_BN.shape[1],
        BLOCK_TOKENS=k_pool.shape[1],
        HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_BLOCK=triton.next_power_of_2(num_heads * key_dim),
        VALUE_BLOCK=triton.next_power_of_2(num_heads * value_dim),
        num_warps=4,
        **dependent_launch(k_BTHD.device),
    )
