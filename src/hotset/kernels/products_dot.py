"""Products of four to eight tokens on tensor cores: see `products`, which chooses.

A program takes 16 rows of a matrix through shared memory, the columns in turn, and all tokens at
once. On an H200 the products around a layer's experts (5120 x 2048, 2048 x 4096, 128 x 2048, BF16)
take 19.1 us with eight tokens and 18.2 with four, where rows held in registers take 29.4 and 21.8;
with two tokens these take 16.2, tensor cores 16.5. A token's bits do not depend on the others.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hotset.kernels.dependent import dependent_launch, wait_for_previous
from hotset.kernels.device import dot_rows, is_interpreted, load_tile, round_to
from hotset.kernels.product_parts import alignment, arguments, block_ends, pick, pick_address

# One instruction of a tensor core takes 16 rows of weights, and 8 tokens on the other side.
_ROWS, _TOKENS = 16, 8
_COLS = 256
_STAGES = 4
_LEAST_TOKENS = 4
# A program reads its rows alone, and of fewer than this many the last bytes come late: a router's
# 128 rows would be 8 programs.
_LEAST_PROGRAMS = 64


@triton.jit
def _dot_kernel(
    x_TC,
    w0,
    w1,
    w2,
    w3,
    b0,
    b1,
    b2,
    b3,
    y0,
    y1,
    y2,
    y3,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    N3: tl.constexpr,
    BLOCKS_1: tl.constexpr,
    BLOCKS_2: tl.constexpr,
    BLOCKS_3: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
    INTERPRET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    block = tl.program_id(0)
    before = pick(block, 0, BLOCKS_1, BLOCKS_2, BLOCKS_3, BLOCKS_1, BLOCKS_2, BLOCKS_3)
    num_rows = pick(block, N0, N1, N2, N3, BLOCKS_1, BLOCKS_2, BLOCKS_3)
    dtype: tl.constexpr = x_TC.dtype.element_ty
    pointer: tl.constexpr = tl.pointer_type(dtype)
    weights = pick_address(block, w0, w1, w2, w3, BLOCKS_1, BLOCKS_2, BLOCKS_3)
    w_NC = tl.multiple_of(weights.to(pointer), ALIGNMENT)
    row = (block - before) * ROWS + tl.arange(0, ROWS)
    token, col = tl.arange(0, TOKENS), tl.arange(0, COLS)
    is_row, is_token = row < num_rows, token < NUM_TOKENS
    w_at = w_NC + row.to(tl.int64)[:, None] * COLUMNS + col[None, :]
    x_at = x_TC + token[:, None] * COLUMNS + col[None, :]
    wait_for_previous(DEPENDENT)

    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(0, COLUMNS, COLS):
        real = (first + col < COLUMNS)[None, :]
        w = load_tile(w_at + first, is_row[:, None] & real, WHOLE)
        x = tl.load(x_at + first, mask=is_token[:, None] & real, other=0.0)
        acc = dot_rows(w, x, acc, INTERPRET)
    if HAS_BIAS:
        bias_N = pick_address(block, b0, b1, b2, b3, BLOCKS_1, BLOCKS_2, BLOCKS_3).to(pointer)
        acc += tl.load(bias_N + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    y_TN = pick_address(block, y0, y1, y2, y3, BLOCKS_1, BLOCKS_2, BLOCKS_3).to(pointer)
    at = y_TN + token[None, :] * num_rows + row[:, None]
    tl.store(at, round_to(acc, dtype, INTERPRET), mask=is_row[:, None] & is_token[None, :])


def pays(num_tokens: int, sizes: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether products are faster so; by shapes alone, as the two differ in low bits.

    Args:
        num_tokens: T.
        sizes: rows of each matrix.
        dtype: of inputs and weights.
    """
    enough = block_ends(sizes, _ROWS)[-1] >= _LEAST_PROGRAMS
    return _LEAST_TOKENS <= num_tokens <= _TOKENS and dtype.itemsize == 2 and enough


def launch_dot_products(
    x_TC: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """As `products.launch_products`, for up to eight tokens of two bytes an element."""
    num_tokens, columns = x_TC.shape
    assert num_tokens <= _TOKENS and x_TC.element_size() == 2, (num_tokens, x_TC.dtype)
    sizes = [w.shape[0] for w in weights]
    outs = [x_TC.new_empty(num_tokens, size) for size in sizes]
    _dot_kernel[(block_ends(sizes, _ROWS)[-1],)](
        x_TC,
        *arguments(weights, biases, outs, _ROWS),
        NUM_TOKENS=num_tokens,
        COLUMNS=columns,
        HAS_BIAS=bool(biases),
        WHOLE=columns % _COLS == 0 and all(size % _ROWS == 0 for size in sizes),
        ALIGNMENT=alignment(weights),
        ROWS=_ROWS,
        TOKENS=_TOKENS,
        COLS=_COLS,
        INTERPRET=is_interpreted(_dot_kernel),
        num_warps=1,
        num_stages=_STAGES,
        **dependent_launch(x_TC.device),
    )
    return outs
