"""Two tokens or more: a grouped GEMM over pairs sorted by expert, weights through addresses.

    u = W_up x (+ up_bias); h = round(gate(u)); y = W_down h (+ down_bias), sums in FP32

A block holds 16 to 128 pairs of one expert, so a small batch reads each record tile once. The dot
form serves small batches too: a tensor core takes 16 tokens in the time of one, while accumulators
of an FMA form grow with the tokens. Prompts run the same products in another frame (`moe_prompt`).
Knows addresses, not where they lead; an address of 0 is skipped, so a ring of staging buffers
calls this once for each group of experts, into one `out`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hotset.core.geometry import ExpertSpec
from hotset.kernels.device import (
    apply_gate,
    dot_rows,
    field_pointer,
    gate_constants,
    is_interpreted,
    load_bias,
    load_tile,
    load_weights,
    round_to,
    up_rows,
)
from hotset.kernels.grouping import Grouping
from hotset.kernels.launch import Tile, grouped_tile, shared_memory_bytes
from hotset.kernels.lossless import lossless_tile
from hotset.kernels.packed import Matrix, input_columns, packed_tile


@triton.jit
def block_and_tile(program, num_blocks, NUM_TILES: tl.constexpr, GROUP: tl.constexpr):
    """(token block, row tile) of a program.

    Programs run through `GROUP` token blocks before they go on to the next row tile, so that
    the blocks of one expert find its weights in L2; with GROUP = 1 row tiles come first.
    """
    group = program // (GROUP * NUM_TILES)
    first = group * GROUP
    size = tl.minimum(num_blocks - first, GROUP)
    within = program % (GROUP * NUM_TILES)
    return first + within % size, within // size


@triton.jit
def block_pairs(order_N, bounds, start, expert, TOKENS: tl.constexpr):
    """(places, pairs, which exist) of the block that begins at place `start` of `order_N`."""
    place = start + tl.arange(0, TOKENS)
    live = place < tl.load(bounds + expert + 1)
    return place, tl.load(order_N + place, mask=live, other=0), live


@triton.jit
def _fill_address(fill_E, bounds, start, expert, FILL: tl.constexpr):
    """Slot to fill, 0 for none. Only an expert's first block fills: one writer for every byte."""
    fill = tl.full((), 0, tl.int64)
    if FILL:
        opens = start == tl.load(bounds + expert)
        fill = tl.where(opens, tl.load(fill_E + expert), fill)
    return fill


@triton.jit
def block_products(
    vectors,
    record,
    fill,
    rows,
    inside,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    FILL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Products of token vectors (pointers [TOKENS]) with `rows` of a matrix of a record.

    Returns [TOKENS, ROWS] FP32. Columns beyond the matrix are zero on both sides: a stray NaN
    beside the matrix must not meet a zero.
    """
    dtype: tl.constexpr = vectors.dtype.element_ty
    weights = field_pointer(record, M.offset, dtype)
    slot = field_pointer(fill, M.offset, dtype)
    whole_cols: tl.constexpr = M.columns % COLS == 0
    whole: tl.constexpr = WHOLE_ROWS and whole_cols
    acc = tl.zeros((TOKENS, ROWS), tl.float32)
    for first in range(0, M.columns, COLS):
        cols = first + tl.arange(0, COLS)
        inputs = input_columns(record, fill, rows, cols, M, FILL)
        v = load_tile(vectors[:, None] + inputs[None, :], (cols < M.columns)[None, :], whole_cols)
        if M.codes == "plain":
            offsets = rows[:, None] * M.columns + cols[None, :]
            tile = inside[:, None] & (cols < M.columns)[None, :]
            w = load_weights(weights, slot, offsets, tile, fill, whole, FILL)
        elif M.codes == "lossless":
            w = lossless_tile(
                record, fill, rows, inside, first, M, dtype, ROWS, COLS, WHOLE_ROWS, FILL, INTERPRET
            )
        else:
            w = packed_tile(
                record,
                fill,
                rows,
                inside,
                first,
                M,
                dtype,
                ROWS,
                COLS,
                WHOLE_ROWS,
                FILL,
                INTERPRET,
            )
        acc = dot_rows(v, w, acc, INTERPRET)
    return acc


@triton.jit
def _store_rows(y_NH, y, pair, live, rows, HIDDEN: tl.constexpr):
    out = y_NH + pair.to(tl.int64)[:, None] * HIDDEN + rows[None, :]
    tl.store(out, y, mask=live[:, None] & (rows < HIDDEN)[None, :])


@triton.jit
def _up_kernel(
    x_TH,
    order_N,
    bounds,
    block_expert,
    block_start,
    address_E,
    fill_E,
    h_NI,
    num_blocks,
    num_experts,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    FORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    FILL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    dtype: tl.constexpr = x_TH.dtype.element_ty
    units: tl.constexpr = ROWS // 2 if GATED else ROWS
    whole: tl.constexpr = INTER % units == 0
    tiles: tl.constexpr = (INTER + units - 1) // units
    block, tile = block_and_tile(tl.program_id(0), num_blocks, tiles, GROUP)
    expert = tl.load(block_expert + block)
    if (expert < 0) | (expert >= num_experts):
        return
    record = tl.load(address_E + expert)
    if record == 0:
        return
    start = tl.load(block_start + block)
    place, pair, live = block_pairs(order_N, bounds, start, expert, TOKENS)
    fill = _fill_address(fill_E, bounds, start, expert, FILL)

    rows, inside = up_rows(tile * units, INTER, ROWS, GATED)
    x_T = x_TH + (pair // TOP_K).to(tl.int64) * HIDDEN
    u = block_products(
        x_T, record, fill, rows, inside, M, TOKENS, ROWS, COLS, whole, FILL, INTERPRET
    )
    if HAS_BIAS:
        u += load_bias(record, fill, rows, inside, BIAS, dtype, whole, FILL)[None, :]
    g = u
    if GATED:
        g, u = tl.split(tl.reshape(u, (TOKENS, units, 2)))
    h = apply_gate(g, u, FORM, ACTIVATION, LIMIT, ALPHA, GATE_CAP, UP_CAP)
    unit = tile * units + tl.arange(0, units)
    out = h_NI + place.to(tl.int64)[:, None] * INTER + unit[None, :]
    tl.store(out, round_to(h, dtype, INTERPRET), mask=live[:, None] & (unit < INTER)[None, :])


@triton.jit
def _down_kernel(
    h_NI,
    order_N,
    bounds,
    block_expert,
    block_start,
    address_E,
    fill_E,
    y_NH,
    num_blocks,
    num_experts,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    FILL: tl.constexpr,
    ZERO_ABSENT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    dtype: tl.constexpr = h_NI.dtype.element_ty
    whole: tl.constexpr = HIDDEN % ROWS == 0
    tiles: tl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    block, tile = block_and_tile(tl.program_id(0), num_blocks, tiles, GROUP)
    expert = tl.load(block_expert + block)
    if expert < 0:
        return
    record = tl.load(address_E + expert, mask=expert < num_experts, other=0)
    start = tl.load(block_start + block)
    place, pair, live = block_pairs(order_N, bounds, start, expert, TOKENS)
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside = rows < HIDDEN
    if record == 0:
        live &= (expert == num_experts) | ZERO_ABSENT
        _store_rows(y_NH, tl.zeros((TOKENS, ROWS), tl.float32), pair, live, rows, HIDDEN)
        return
    fill = _fill_address(fill_E, bounds, start, expert, FILL)

    h_T = h_NI + tl.where(live, place, start).to(tl.int64) * INTER
    y = block_products(
        h_T, record, fill, rows, inside, M, TOKENS, ROWS, COLS, whole, FILL, INTERPRET
    )
    if HAS_BIAS:
        y += load_bias(record, fill, rows, inside, BIAS, dtype, whole, FILL)[None, :]
    # Read again: kept from above, they and the pointers would hold registers all through the
    # product (a 128 x 256 tile spilled 240 bytes on sm_90).
    place, pair, live = block_pairs(order_N, bounds, start, expert, TOKENS)
    _store_rows(y_NH, y, pair, live, rows, HIDDEN)


def grouped(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    address_E: torch.Tensor,
    spec: ExpertSpec,
    *,
    grouping: Grouping,
    out: torch.Tensor | None = None,
    fill_E: torch.Tensor | None = None,
) -> torch.Tensor:
    """Expert outputs of any number of tokens; see `dispatch.Kernels.expert_outputs`."""
    (num_tokens, top_k), num_experts = ids_TK.shape, address_E.numel()
    hidden, inter = spec.hidden, spec.intermediate
    y_TKH = out
    if y_TKH is None:
        y_TKH = x_TH.new_empty(num_tokens, top_k, hidden, dtype=torch.float32)
    h_NI = x_TH.new_empty(num_tokens * top_k, inter)
    up_matrix, down_matrix = Matrix.of(spec, "up"), Matrix.of(spec, "down")
    fills = fill_E is not None
    of_block = (x_TH.element_size(), grouping.block_tokens, x_TH.device)
    up, down = (matrix_tile(m, *of_block, fill=fills) for m in (up_matrix, down_matrix))
    units = up.rows // 2 if spec.gate.has_gate else up.rows
    offset = {field.name: field.offset for field in spec.layout.fields}
    blocks = (
        grouping.order_N,
        grouping.bounds,
        grouping.block_expert_B,
        grouping.block_start_B,
        address_E,
        address_E if fill_E is None else fill_E,
    )
    shared = shared_constants(spec, grouping.block_tokens, fill=fills)
    _up_kernel[(grouping.num_blocks * triton.cdiv(inter, units),)](
        x_TH,
        *blocks,
        h_NI,
        grouping.num_blocks,
        num_experts,
        TOP_K=top_k,
        M=up_matrix,
        BIAS=offset.get("up_bias", 0),
        **shared,
        **launch_shape(up),
        **gate_constants(spec.gate),
    )
    _down_kernel[(grouping.num_blocks * triton.cdiv(hidden, down.rows),)](
        h_NI,
        *blocks,
        y_TKH,
        grouping.num_blocks,
        num_experts,
        M=down_matrix,
        BIAS=offset.get("down_bias", 0),
        ZERO_ABSENT=out is None,
        **shared,
        **launch_shape(down),
    )
    return y_TKH


def matrix_tile(
    matrix: Matrix, element_bytes: int, block_tokens: int, device: torch.device, *, fill: bool
) -> Tile:
    return grouped_tile(
        element_bytes,
        block_tokens,
        shared_memory_bytes(device),
        per_word=matrix.per_word,
        # Made in registers, as what is also stored: see `launch._synchronous`.
        fill=fill or matrix.codes == "lossless",
    )


def shared_constants(spec: ExpertSpec, block_tokens: int, *, fill: bool) -> dict[str, Any]:
    """What both kernels are compiled for, whatever their tiles."""
    return {
        "HIDDEN": spec.hidden,
        "INTER": spec.intermediate,
        "HAS_BIAS": spec.has_bias,
        "FILL": fill,
        "TOKENS": block_tokens,
        "INTERPRET": is_interpreted(_up_kernel),
    }


def launch_shape(tile: Tile) -> dict[str, Any]:
    return {
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "GROUP": tile.group,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
