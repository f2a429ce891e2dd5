"""One token: each routed expert's record is read once, wherever its address points.

    u = W_up x (+ up_bias); h = round(gate(u)); y = W_down h (+ down_bias), sums in FP32

Knows addresses, not where they lead, and nothing of the policy behind them. Products are summed
in FP32 in a [rows, cols] accumulator and reduced once at the end (FMA form: with one token a
tensor core would wait for bytes all the same, and this form reached 1.00 of the link's speed of
light on an H200). With `FILL` what has been read is also written to the expert's slot. Quantised
matrices have kernels of their own (`moe_decode_packed`), launched from here.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from hotset.core.geometry import ExpertSpec
from hotset.kernels.dependent import dependent_launch, wait_for_previous, waiting_launch
from hotset.kernels.device import (
    apply_gate,
    fill_address,
    gate_constants,
    is_interpreted,
    load_bias,
    round_to,
    routed_record,
    up_rows,
)
from hotset.kernels.launch import (
    ONE_TOKEN_DOWN,
    ONE_TOKEN_UP,
    packed_one_token_tile,
    plain_one_token_tile,
)
from hotset.kernels.lossless import first_groups, lossless_row_sums
from hotset.kernels.moe_decode_packed import packed_down_kernel, packed_up_kernel
from hotset.kernels.packed import Matrix
from hotset.kernels.plain import first_inputs, first_weights, plain_row_sums


@triton.jit
def _begin(
    record,
    rows,
    inside,
    M: tl.constexpr,
    DTYPE: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """What is read of a matrix before the wait for the previous kernel: a tuple for `_row_sums`."""
    if M.codes == "plain":
        begun = first_weights(record, rows, inside, M, DTYPE, COLS, WHOLE_ROWS, AHEAD)
    else:
        begun = first_groups(record, rows, inside, M, COLS, WHOLE_ROWS)
    return begun


@triton.jit
def _begin_inputs(
    vector, M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, AHEAD: tl.constexpr
):
    """What is read of a vector ahead of `_row_sums`: a tuple."""
    inputs = ()
    if M.codes == "plain":
        inputs = first_inputs(vector, M, ROWS, COLS, AHEAD)
    return inputs


@triton.jit
def _row_sums(
    vector,
    record,
    fill,
    rows,
    inside,
    begun,
    inputs,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
    AHEAD: tl.constexpr,
    FILL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Dot products of `vector` with `rows` of a matrix of a record: [ROWS] FP32."""
    if M.codes == "plain":
        sums = plain_row_sums(
            vector, record, fill, rows, inside, begun, inputs, M, ROWS, COLS, WHOLE, AHEAD, FILL
        )
    else:
        sums = lossless_row_sums(
            vector, record, fill, rows, inside, *begun, M, ROWS, COLS, WHOLE, FILL, INTERPRET
        )
    return sums


@triton.jit
def _up_kernel(
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
    # Ahead of the wait, as ids and addresses: see `one_token`.
    inputs = _begin_inputs(x_H, M, ROWS, COLS, AHEAD + 1)
    expert, _, record = routed_record(ids_K, address_E, num_experts, choice)
    if record == 0:
        wait_for_previous(DEPENDENT)
        return
    dtype: tl.constexpr = x_H.dtype.element_ty
    units: tl.constexpr = ROWS // 2 if GATED else ROWS
    whole: tl.constexpr = INTER % units == 0
    first = tl.program_id(0) * units
    rows, inside = up_rows(first, INTER, ROWS, GATED)
    begun = _begin(record, rows, inside, M, dtype, COLS, whole, AHEAD)
    wait_for_previous(DEPENDENT)
    fill = fill_address(fill_E, expert, FILL)
    u = _row_sums(
        x_H, record, fill, rows, inside, begun, inputs, M, ROWS, COLS, whole, AHEAD, FILL, INTERPRET
    )
    if HAS_BIAS:
        u += load_bias(record, fill, rows, inside, BIAS, dtype, whole, FILL)
    g = u
    if GATED:
        g, u = tl.split(tl.reshape(u, (units, 2)))
    h = apply_gate(g, u, FORM, ACTIVATION, LIMIT, ALPHA, GATE_CAP, UP_CAP)
    unit = first + tl.arange(0, units)
    tl.store(h_KI + choice * INTER + unit, round_to(h, dtype, INTERPRET), mask=unit < INTER)


@triton.jit
def _down_kernel(
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
    TILES: tl.constexpr,
    AHEAD: tl.constexpr,
    FILL: tl.constexpr,
    ZERO_ABSENT: tl.constexpr,
    INTERPRET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    choice = tl.program_id(1)
    expert, real, record = routed_record(ids_K, address_E, num_experts, choice)
    y_H = y_KH + choice * HIDDEN
    first = tl.program_id(0) * (ROWS * TILES)
    if record == 0:
        wait_for_previous(DEPENDENT)
        absent = first + tl.arange(0, ROWS * TILES)
        zeroed = (absent < HIDDEN) & ((real == 0) | ZERO_ABSENT)
        tl.store(y_H + absent, tl.zeros((ROWS * TILES,), tl.float32), mask=zeroed)
        return
    dtype: tl.constexpr = h_KI.dtype.element_ty
    whole: tl.constexpr = HIDDEN % (ROWS * TILES) == 0
    rows = first + tl.arange(0, ROWS)
    begun = _begin(record, rows, rows < HIDDEN, M, dtype, COLS, whole, AHEAD)
    # What the match wrote is there already: the first projection has waited for it.
    fill = fill_address(fill_E, expert, FILL)
    wait_for_previous(DEPENDENT)
    h_I = h_KI + choice * INTER
    h = _begin_inputs(h_I, M, ROWS, COLS, AHEAD)
    for tile in tl.static_range(TILES):
        now, rows = begun, first + tile * ROWS + tl.arange(0, ROWS)
        inside, later = rows < HIDDEN, rows + ROWS
        if tile + 1 < TILES:  # ahead of this tile's stores, over which no load is moved
            begun = _begin(record, later, later < HIDDEN, M, dtype, COLS, whole, AHEAD)
        y = _row_sums(
            h_I, record, fill, rows, inside, now, h, M, ROWS, COLS, whole, AHEAD, FILL, INTERPRET
        )
        if HAS_BIAS:
            y += load_bias(record, fill, rows, inside, BIAS, dtype, whole, FILL)
        tl.store(y_H + rows, y, mask=inside)


def one_token(
    x_1H: torch.Tensor,
    ids_1K: torch.Tensor,
    address_E: torch.Tensor,
    spec: ExpertSpec,
    *,
    out: torch.Tensor | None = None,
    fill_E: torch.Tensor | None = None,
    behind_match: bool = False,
) -> torch.Tensor:
    """Expert outputs of one token; see `dispatch.Kernels.expert_outputs`.

    The first weights are read before the previous kernel has ended, and so are ids, addresses and
    `x_1H`. For the second projection that kernel is the first one. For the first one it is the
    match, which writes none of these, and which lets nobody begin before its own predecessors are
    complete; where another kernel comes before, which may have written them, its end is waited for.
    """
    choices, num_experts = ids_1K.numel(), address_E.numel()
    hidden, inter, gated = spec.hidden, spec.intermediate, spec.gate.has_gate
    y_1KH = x_1H.new_empty(1, choices, hidden, dtype=torch.float32) if out is None else out
    h_KI = x_1H.new_empty(choices, inter)
    up_kernel, up = _projection(spec, "up", x_1H)
    down_kernel, down = _projection(spec, "down", x_1H)
    units = up["ROWS"] // 2 if gated else up["ROWS"]
    routed = (ids_1K, address_E, address_E if fill_E is None else fill_E)
    shared = _shared_constants(spec, fill=fill_E is not None)
    dependent = dependent_launch(x_1H.device)
    up_kernel[(_num_tiles(inter, units, up), choices)](
        x_1H,
        *routed,
        h_KI,
        num_experts,
        **up,
        **shared,
        **gate_constants(spec.gate),
        **(dependent if behind_match else waiting_launch(dependent)),
    )
    down_rows = down["ROWS"] * down.get("TILES", 1)
    down_kernel[(_num_tiles(hidden, down_rows, down), choices)](
        h_KI,
        *routed,
        y_1KH,
        num_experts,
        ZERO_ABSENT=out is None,
        **down,
        **shared,
        **dependent,
    )
    return y_1KH


def _num_tiles(rows: int, tile_rows: int, constants: dict[str, Any]) -> int:
    """Programs that take all rows of a half; a tile holds rows that are `stride` apart."""
    stride: int = constants["M"].stride
    return -(-rows // (tile_rows * stride)) * stride


def _shared_constants(spec: ExpertSpec, *, fill: bool) -> dict[str, Any]:
    """What both kernels are compiled for, whatever their tiles."""
    return {
        "HIDDEN": spec.hidden,
        "INTER": spec.intermediate,
        "HAS_BIAS": spec.has_bias,
        "FILL": fill,
        "INTERPRET": is_interpreted(_up_kernel),
    }


def _projection(spec: ExpertSpec, name: str, x_1H: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """The kernel, and arguments of its launch: where matrix and bias are in a record, the tile."""
    matrix = Matrix.of(spec, name)
    is_up = name == "up"
    if matrix.codes in ("plain", "lossless"):  # which has the bits of plain, sums included
        kernel = _up_kernel if is_up else _down_kernel
        tile = (ONE_TOKEN_UP if is_up else ONE_TOKEN_DOWN)[x_1H.element_size()]
        rows = spec.intermediate if is_up else spec.hidden
        if matrix.codes == "plain":
            tile = plain_one_token_tile(tile, rows, matrix.columns)
        else:
            tile = replace(tile, tiles=1, registers=None)
        pipeline = {"AHEAD": tile.stages, "num_stages": tile.stages}
        if not is_up:
            pipeline["TILES"] = tile.tiles
        if tile.registers is not None:
            pipeline["maxnreg"] = tile.registers
    else:
        kernel = packed_up_kernel if is_up else packed_down_kernel
        light = matrix.scale_is_bfloat16 and matrix.zero < 0
        tile = packed_one_token_tile(
            name, matrix.columns, matrix.per_word, light=light, period=matrix.line_period
        )
        matrix = replace(matrix, stride=tile.stride)
        pipeline = {"AHEAD": min(tile.stages, triton.cdiv(matrix.columns, tile.cols))}
    offset = {field.name: field.offset for field in spec.layout.fields}
    return kernel, pipeline | {
        "M": matrix,
        "BIAS": offset.get(f"{name}_bias", 0),
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "num_warps": tile.warps,
    }
