"""Device functions that read a plain matrix of a record, and multiply it with one token's vector.

Knows one matrix; nothing of experts or tokens. Products are summed in FP32 in a [rows, cols]
accumulator, one step of columns after the other, and reduced once at the end: `ROWS`, `COLS` and
the warps give the order of sums, which `lossless.lossless_row_sums` keeps.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment"
# (tuples that grow)

from __future__ import annotations

import triton
import triton.language as tl

from hotset.kernels.device import field_pointer, load_tile


@triton.jit
def _weights_at(
    record,
    rows,
    inside,
    first,
    M: tl.constexpr,
    DTYPE: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
):
    """Weights of `rows` of a plain matrix and of the columns from `first` on: [ROWS, COLS]."""
    cols = first + tl.arange(0, COLS)
    tile = inside[:, None] & (cols < M.columns)[None, :]
    weights = field_pointer(record, M.offset, DTYPE) + rows[:, None] * M.columns + cols[None, :]
    return load_tile(weights, tile, WHOLE_ROWS and M.columns % COLS == 0)


@triton.jit
def _inputs_at(vector, first, NUM_COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The vector's part for such a tile, the same in each row: [ROWS, COLS].

    As a row of its own it would reach the weights' threads through shared memory, and each step
    would wait for all warps.
    """
    cols = tl.zeros((ROWS, 1), tl.int32) + (first + tl.arange(0, COLS))[None, :]
    return load_tile(vector + cols, cols < NUM_COLUMNS, NUM_COLUMNS % COLS == 0)


@triton.jit
def first_inputs(
    vector,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """What `plain_row_sums` begins with of the vector: as `first_weights` of the weights."""
    steps: tl.constexpr = (M.columns + COLS - 1) // COLS
    inputs = ()
    for step in tl.static_range(min(AHEAD, steps)):
        inputs += (_inputs_at(vector, step * COLS, M.columns, ROWS, COLS),)
    return inputs


@triton.jit
def first_weights(
    record,
    rows,
    inside,
    M: tl.constexpr,
    DTYPE: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """What `plain_row_sums` begins with: weights of the first `AHEAD` steps, of all if fewer."""
    steps: tl.constexpr = (M.columns + COLS - 1) // COLS
    tiles = ()
    for step in tl.static_range(min(AHEAD, steps)):
        tile = _weights_at(record, rows, inside, step * COLS, M, DTYPE, COLS, WHOLE_ROWS)
        tiles += (tile,)
    return tiles


@triton.jit
def plain_row_sums(
    vector,
    record,
    fill,
    rows,
    inside,
    weights,
    inputs,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    FILL: tl.constexpr,
):
    """Dot products of `vector` with `rows` of a plain matrix of a record: [ROWS] FP32.

    Args:
        weights: see `first_weights`.
        inputs: see `first_inputs`, at least `AHEAD` steps.
        AHEAD: steps in flight. All steps are laid out one by one, loads ahead of stores: over a
            store that may lead anywhere the compiler moves no load.
    """
    dtype: tl.constexpr = vector.dtype.element_ty
    steps: tl.constexpr = (M.columns + COLS - 1) // COLS
    slot = field_pointer(fill, M.offset, dtype)
    inputs_ahead: tl.constexpr = len(inputs)
    # The first product is added to -0, which changes no bit of it.
    acc = tl.full((ROWS, COLS), -0.0, tl.float32)
    for step in tl.static_range(steps):
        if step + AHEAD < steps:
            later = (step + AHEAD) * COLS
            tile = _weights_at(record, rows, inside, later, M, dtype, COLS, WHOLE_ROWS)
            weights += (tile,)
        if step + inputs_ahead < steps:
            later = (step + inputs_ahead) * COLS
            inputs += (_inputs_at(vector, later, M.columns, ROWS, COLS),)
        if FILL:
            cols = step * COLS + tl.arange(0, COLS)
            filled = tl.full((ROWS, COLS), 1, tl.int1) & (fill != 0)
            if not (WHOLE_ROWS and M.columns % COLS == 0):
                filled &= inside[:, None] & (cols < M.columns)[None, :]
            tl.store(slot + rows[:, None] * M.columns + cols[None, :], weights[step], mask=filled)
        acc += weights[step].to(tl.float32) * inputs[step].to(tl.float32)
    return tl.sum(acc, 1)
