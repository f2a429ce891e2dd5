"""One token, quantised records: the kernels of `moe_decode` with products on tensor cores.

Decoding leaves few instructions for each weight, so those of an FMA (a conversion of weight and
input, the product) are what a tensor core saves. Weights, gates and what is filled are those of
`moe_decode`; sums are in FP32 in the order of `packed_rows`. Knows addresses, not where they lead.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from hotset.kernels.dependent import wait_for_previous
from hotset.kernels.device import apply_gate, fill_address, load_bias, round_to, routed_record
from hotset.kernels.packed_rows import (
    first_inputs,
    packed_row_sums,
    read_ahead,
    tile_rows,
    tile_units,
)


@triton.jit
def packed_up_kernel(
    x_H,
    ids_K,
    address_E,
    fill_E,
    h_KI,
    num_experts,
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
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    AHEAD: tl.constexpr,
    FILL: tl.constexpr,
    INTERPRET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    choice = tl.program_id(1)
    expert, _, record = routed_record(ids_K, address_E, num_experts, choice)
    if record == 0:
        wait_for_previous(DEPENDENT)
        return
    dtype: tl.constexpr = x_H.dtype.element_ty
    units: tl.constexpr = ROWS // 2 if GATED else ROWS
    whole: tl.constexpr = INTER % (units * M.stride) == 0
    rows, inside, begin = tile_rows(tl.program_id(0), M, ROWS, GATED)
    x_in = first_inputs(x_H, record, rows, begin, M, COLS)
    ahead = read_ahead(record, rows, inside, begin, M, COLS, AHEAD, whole)
    wait_for_previous(DEPENDENT)
    fill = fill_address(fill_E, expert, FILL)
    u = packed_row_sums(
        x_H, record, fill, rows, inside, begin, ahead, x_in, M, COLS, AHEAD, whole, FILL, INTERPRET
    )
    if HAS_BIAS:
        u += load_bias(record, fill, rows, inside, BIAS, dtype, whole, FILL)
    unit, g = rows, u
    if GATED:
        g, u = tl.split(tl.trans(tl.reshape(u, (2, units))))
        unit = tile_units(tl.program_id(0), tl.arange(0, units), units, M.stride)
    h = apply_gate(g, u, FORM, ACTIVATION, LIMIT, ALPHA, GATE_CAP, UP_CAP)
    tl.store(h_KI + choice * INTER + unit, round_to(h, dtype, INTERPRET), mask=unit < INTER)


@triton.jit
def packed_down_kernel(
    h_KI,
    ids_K,
    address_E,
    fill_E,
    y_KH,
    num_experts,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    AHEAD: tl.constexpr,
    FILL: tl.constexpr,
    ZERO_ABSENT: tl.constexpr,
    INTERPRET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    choice = tl.program_id(1)
    expert, real, record = routed_record(ids_K, address_E, num_experts, choice)
    rows, inside, begin = tile_rows(tl.program_id(0), M, ROWS, False)
    out = y_KH + choice * HIDDEN + rows
    if record == 0:
        wait_for_previous(DEPENDENT)
        zeroed = (real == 0) | ZERO_ABSENT
        tl.store(out, tl.zeros(rows.shape, tl.float32), mask=inside & zeroed)
        return
    dtype: tl.constexpr = h_KI.dtype.element_ty
    whole: tl.constexpr = HIDDEN % (ROWS * M.stride) == 0
    ahead = read_ahead(record, rows, inside, begin, M, COLS, AHEAD, whole)
    # What the match wrote is there already: the first projection has waited for it.
    fill = fill_address(fill_E, expert, FILL)
    wait_for_previous(DEPENDENT)
    h_I = h_KI + choice * INTER
    x_in = first_inputs(h_I, record, rows, begin, M, COLS)
    y = packed_row_sums(
        h_I, record, fill, rows, inside, begin, ahead, x_in, M, COLS, AHEAD, whole, FILL, INTERPRET
    )
    if HAS_BIAS:
        y += load_bias(record, fill, rows, inside, BIAS, dtype, whole, FILL)
    tl.store(out, y, mask=inside)
