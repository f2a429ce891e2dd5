"""Writes new keys and values into their blocks, both in one launch, as they are or in eight bits.

Token t of T new ones of a row is position length - T + t; it goes to block
block_table[b, (position // block_tokens) % N]. Knows blocks, not sequences: padded rows (length 0)
write nothing, and where a ring of N blocks is shorter than what is new, only the last round stays.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from hotset.kernels.dependent import dependent_launch, wait_for_previous
from hotset.kernels.kv_fp8 import encode_rows
from hotset.kernels.relaunch import Relaunch, row_stride


@triton.jit
def _copy_heads(
    source,
    target,
    head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: [HEADS, DIM] with any head stride to contiguous; a rotary part may have no DIM."""
    if DIM > 0:
        element = tl.arange(0, BLOCK)
        real = element < HEADS * DIM
        at = (element // DIM) * head_stride + element % DIM
        tl.store(target + element, tl.load(source + at, mask=real), mask=real)


@triton.jit
def _quantise_heads(
    source,
    target,
    exponents,
    head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One token: [HEADS, DIM] with any head stride to contiguous codes and their exponents."""
    head, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    real = (head < HEADS)[:, None] & (c < DIM)[None, :]
    x = tl.load(source + head[:, None] * head_stride + c[None, :], mask=real, other=0.0)
    codes, e = encode_rows(x.to(tl.float32))
    tl.store(target + head[:, None] * DIM + c[None, :], codes, mask=real)
    tl.store(exponents + head, e, mask=head < HEADS)


@triton.jit
def _slot_of(length, position, table, num_blocks, BLOCK_TOKENS: tl.constexpr):
    """Where a position of a row lies, as a token of the whole pool; -1 for nowhere."""
    entry = (position // BLOCK_TOKENS) % num_blocks
    kept = (position >= 0) & (length > 0) & (position >= length - num_blocks * BLOCK_TOKENS)
    block = tl.load(table + entry, mask=kept, other=0).to(tl.int64)
    return tl.where(kept, block * BLOCK_TOKENS + position % BLOCK_TOKENS, -1)


@triton.jit
def _write_kernel(
    k_BTHD,
    v_BTHD,
    k_pool,
    v_pool,
    k_exponents,
    v_exponents,
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
    ROWS: tl.constexpr,
    FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_B + row)
    position = length - tl.num_programs(0) + tl.program_id(0)
    slot = _slot_of(length, position, block_table_BN + row * num_blocks, num_blocks, BLOCK_TOKENS)
    if slot < 0:
        return
    k = k_BTHD + row * k_row_stride + token * k_token_stride
    v = v_BTHD + row * v_row_stride + token * v_token_stride
    k_out, v_out = k_pool + slot * (HEADS * KEY_DIM), v_pool + slot * (HEADS * VALUE_DIM)
    if FP8:
        k_powers, v_powers = k_exponents + slot * HEADS, v_exponents + slot * HEADS
        _quantise_heads(k, k_out, k_powers, k_head_stride, HEADS, KEY_DIM, ROWS, KEY_BLOCK)
        _quantise_heads(v, v_out, v_powers, v_head_stride, HEADS, VALUE_DIM, ROWS, VALUE_BLOCK)
    else:
        _copy_heads(k, k_out, k_head_stride, HEADS, KEY_DIM, KEY_BLOCK)
        _copy_heads(v, v_out, v_head_stride, HEADS, VALUE_DIM, VALUE_BLOCK)


def write_kv(
    k_BTHD: torch.Tensor,
    v_BTHD: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    exponents: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes T new tokens of every row into the pools; see `attention.AttentionKernels.write`.

    Args:
        k_BTHD, v_BTHD: any strides but the last.
        k_pool, v_pool: contiguous.
    """
    batch, num_new, num_heads, key_dim = k_BTHD.shape
    value_dim = v_BTHD.shape[-1]
    is_fp8 = exponents is not None
    dims = (num_heads, key_dim, value_dim)
    run = _writes(k_pool.shape[1], *dims, is_fp8=is_fp8, device=k_BTHD.device)
    powers = (k_pool, v_pool) if exponents is None else exponents
    strides = [row_stride(x, axis) for x in (k_BTHD, v_BTHD) for axis in range(3)]
    run(
        (num_new, batch),
        (k_BTHD, v_BTHD, k_pool, v_pool, *powers, block_table_BN, lengths_B),
        (*strides, block_table_BN.shape[1]),
    )


@cache
def _writes(
    block_tokens: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    is_fp8: bool,
    device: torch.device,
) -> Relaunch:
    # Codes go head by head, what is only copied all at once.
    at_once = 1 if is_fp8 else num_heads
    constants = {
        "BLOCK_TOKENS": block_tokens,
        "HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_BLOCK": triton.next_power_of_2(at_once * key_dim),
        "VALUE_BLOCK": max(1, triton.next_power_of_2(at_once * value_dim)),
        "ROWS": triton.next_power_of_2(num_heads),
        "FP8": is_fp8,
        "num_warps": 4,
        **dependent_launch(device),
    }
    return Relaunch(_write_kernel, constants)
