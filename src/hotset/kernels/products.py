"""Products of a few tokens with up to four weight matrices in one launch: y_i = x W_i^T (+ b_i).

    y[t, n] = round(sum over k of x[t, k] W[n, k] (+ b[n])), products and sum in FP32

A decode step multiplies the same row with several matrices (queries, keys and values; a shared
expert's gate and up). Each alone waits for launch and latency, not for bytes: on an H200 a product
of 2 MiB took 5.4 us, one of 16 MiB 6.9. A program holds whole rows of a matrix in registers, reads
them while the kernel before it still runs, and takes all tokens over them; so its sums have one
order whatever the number of tokens. From four tokens on tensor cores take them (`products_dot`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment"
# (tuples that grow)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hotset.kernels.dependent import dependent_launch, wait_for_previous
from hotset.kernels.device import is_interpreted, load_tile, round_to
from hotset.kernels.product_parts import (
    MAX_MATRICES,
    alignment,
    arguments,
    block_ends,
    pick,
    pick_address,
)
from hotset.kernels.products_dot import launch_dot_products, pays

MAX_TOKENS = 8
# Columns of a matrix whose rows a program can hold.
MAX_COLUMNS = 16384
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A thread holds this many bytes of weights, in 16-byte loads: enough in flight for HBM's latency,
# and few enough registers for several programs on a multiprocessor.
_THREAD_BYTES = 128
_WARPS = 4
# Tokens whose inputs are on their way. The products of a layer (5120 x 2048, 2048 x 4096, 128 x
# 2048, BF16, an H200) of 2, 4 and 8 tokens: 16.4, 21.1, 29.5 us; none ahead 18.2, 23.1, 39.4; three
# 16.7, 21.1, 29.5.
_TOKENS_AHEAD = 2
# With fewer programs than this, multiprocessors of a large card would stay idle (132 on an H200).
_LEAST_PROGRAMS = 256


@triton.jit
def _sums_of_tokens(
    x_TC,
    w,
    col,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Products of each token with the rows `w` [ROWS, COLS] FP32: [ROWS] of each.

    Inputs are read tokens ahead, and nothing is stored in between: over a store, or a barrier as
    each sum meets, the compiler moves no load.
    """
    xs, ys = (), ()
    for t in tl.static_range(TOKENS + AHEAD):
        if t < TOKENS:
            xs += (load_tile(x_TC + t * COLUMNS + col, col < COLUMNS, COLS == COLUMNS),)
        if t >= AHEAD:
            ys += (tl.sum(w * xs[t - AHEAD].to(tl.float32)[None, :], 1),)
    return ys


@triton.jit
def _products_kernel(
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
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    CONSTANT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    AHEAD: tl.constexpr,
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
    col = tl.arange(0, COLS)
    inside = (row < num_rows)[:, None] & (col < COLUMNS)[None, :]
    if not CONSTANT:
        wait_for_previous(DEPENDENT)
    # Weights never change: they are on their way before the previous kernel is done.
    at = row.to(tl.int64)[:, None] * COLUMNS + col[None, :]
    w = load_tile(w_NC + at, inside, WHOLE_TILES).to(tl.float32)
    if CONSTANT:
        wait_for_previous(DEPENDENT)

    y_TN = pick_address(block, y0, y1, y2, y3, BLOCKS_1, BLOCKS_2, BLOCKS_3).to(pointer)
    if HAS_BIAS:
        bias_N = pick_address(block, b0, b1, b2, b3, BLOCKS_1, BLOCKS_2, BLOCKS_3).to(pointer)
        bias = tl.load(bias_N + row, mask=row < num_rows, other=0.0).to(tl.float32)
    sums = _sums_of_tokens(x_TC, w, col, TOKENS, COLUMNS, COLS, AHEAD)
    for t in tl.static_range(TOKENS):
        total = sums[t] + bias if HAS_BIAS else sums[t]
        at = y_TN + t * num_rows + row
        tl.store(at, round_to(total, dtype, INTERPRET), mask=row < num_rows)


def accepts(num_tokens: int, num_columns: int, dtype: torch.dtype) -> bool:
    """Whether `products` takes inputs of this shape and dtype."""
    return (
        0 < num_tokens <= MAX_TOKENS
        and num_columns <= MAX_COLUMNS
        and num_columns * dtype.itemsize % 16 == 0
        and dtype in _DTYPES
    )


def rows_of_program(num_columns: int, num_rows: int, element_bytes: int) -> int:
    """Rows of a matrix that one program holds; a power of two."""
    columns = triton.next_power_of_2(num_columns)
    rows = max(1, _THREAD_BYTES * 32 * _WARPS // (columns * element_bytes))
    while rows > 1 and triton.cdiv(num_rows, rows) < _LEAST_PROGRAMS:
        rows //= 2
    return int(rows)


def launch_products(
    x_TC: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    *,
    rows: int | None = None,
    warps: int = _WARPS,
) -> list[torch.Tensor]:
    """Products of the rows of `x_TC` with each matrix. Which kernel runs shapes alone decide.

    Args:
        x_TC: [T, C], T at most `MAX_TOKENS`, contiguous.
        weights: up to `MAX_MATRICES` of [N_i, C], contiguous, dtype of `x_TC`. Those that are
            parameters must not change while kernels run: they are read ahead.
        biases: none, or one of [N_i] for each matrix.
        rows, warps: of a program that holds rows, for measurements; they may change low bits.

    Returns:
        [T, N_i] for each matrix, in the dtype of `x_TC`.
    """
    num_tokens, columns = x_TC.shape
    assert 0 < len(weights) <= MAX_MATRICES and len(biases) in (0, len(weights))
    assert x_TC.is_contiguous() and all(w.is_contiguous() for w in weights)
    assert all(w.shape[1] == columns and w.dtype == x_TC.dtype for w in weights)
    sizes = [w.shape[0] for w in weights]
    if rows is None and pays(num_tokens, sizes, x_TC.dtype):
        return launch_dot_products(x_TC, weights, biases)
    rows = rows_of_program(columns, sum(sizes), x_TC.element_size()) if rows is None else rows
    cols = triton.next_power_of_2(columns)
    outs = [x_TC.new_empty(num_tokens, size) for size in sizes]
    _products_kernel[(block_ends(sizes, rows)[-1],)](
        x_TC,
        *arguments(weights, biases, outs, rows),
        TOKENS=num_tokens,
        COLUMNS=columns,
        HAS_BIAS=bool(biases),
        WHOLE_TILES=columns == cols and all(size % rows == 0 for size in sizes),
        CONSTANT=all(isinstance(w, torch.nn.Parameter) for w in weights),
        ALIGNMENT=alignment(weights),
        ROWS=rows,
        COLS=cols,
        AHEAD=min(_TOKENS_AHEAD, num_tokens),
        INTERPRET=is_interpreted(_products_kernel),
        num_warps=warps,
        **dependent_launch(x_TC.device),
    )
    return outs


def products_reference(
    x_TC: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The specification: sums in FP32, rounded once."""
    sums = [x_TC.float() @ w.float().T for w in weights]
    if biases:
        sums = [y + b.float() for y, b in zip(sums, biases, strict=True)]
    return [y.to(x_TC.dtype) for y in sums]


@torch.library.custom_op("hotset::products", mutates_args=())
def products(
    x_TC: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> list[torch.Tensor]:
    """`launch_products` on CUDA, the reference elsewhere, as an operator."""
    launch = launch_products if x_TC.is_cuda else products_reference
    return launch(x_TC.contiguous(), weights, biases)


@products.register_fake
def _(
    x_TC: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> list[torch.Tensor]:
    return [x_TC.new_empty(len(x_TC), len(w)) for w in weights]
