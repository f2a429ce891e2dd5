"""Two to eight tokens: each routed expert's record is read once, for all tokens that share it.

    u = W_up x (+ up_bias); h = round(gate(u)); y = W_down h (+ down_bias), sums in FP32

A program holds whole rows of a matrix in registers, read while the kernel before it still runs,
and takes one token after the other over them. Of the pairs that are routed to an expert the first
one's programs do this, the others' end at once: nothing is sorted beforehand. Plain matrices only,
of rows that registers hold. Knows addresses, not where they lead.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment"
# (tuples that grow)

from __future__ import annotations

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
)
from hotset.kernels.launch import Tile, few_tokens_tile
from hotset.kernels.packed import Matrix
from hotset.kernels.plain import first_inputs, first_weights, plain_row_sums


@triton.jit
def _sharing(ids_N, expert, NUM_PAIRS: tl.constexpr, PAIRS: tl.constexpr):
    """Which pairs are routed to an expert: [PAIRS]."""
    place = tl.arange(0, PAIRS)
    ids = tl.load(ids_N + place, mask=place < NUM_PAIRS, other=-1)
    return ids.to(tl.int64) == expert


@triton.jit
def _next_pair(sharing, pair, PAIRS: tl.constexpr):
    """The first of these pairs behind `pair`; `PAIRS` where there is none."""
    place = tl.arange(0, PAIRS)
    return tl.min(tl.where(sharing & (place > pair), place, PAIRS), 0)


@triton.jit
def _again(weights, INTERPRET: tl.constexpr):
    """The same weights, behind which the compiler does not look.

    It would convert them once for all tokens, into twice their registers.
    """
    out = ()
    for step in tl.static_range(len(weights)):
        w = weights[step]
        if not INTERPRET and w.dtype.primitive_bitwidth == 16:
            w = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [w], dtype=w.dtype, is_pure=False, pack=2
            )
        out += (w,)
    return out


@triton.jit
def _held_sums(
    vector,
    place,
    weights,
    inputs,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
    FILL: tl.constexpr,
):
    """Products of a vector with rows that are held, with their bias: [ROWS] FP32.

    Args:
        place: of the rows: record, slot to fill, rows, and which of them exist.
    """
    record, fill, rows, inside = place
    steps: tl.constexpr = len(weights)
    sums = plain_row_sums(
        vector, record, fill, rows, inside, weights, inputs, M, ROWS, COLS, WHOLE, steps, FILL
    )
    if HAS_BIAS:
        dtype: tl.constexpr = vector.dtype.element_ty
        sums += load_bias(record, fill, rows, inside, BIAS, dtype, WHOLE, FILL)
    return sums


@triton.jit
def _hidden(
    u,
    UNITS: tl.constexpr,
    GATED: tl.constexpr,
    FORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
):
    """The gate's output [UNITS] of sums [ROWS], those of the gate's half first."""
    g = u
    if GATED:
        g, u = tl.split(tl.trans(tl.reshape(u, (2, UNITS))))
    return apply_gate(g, u, FORM, ACTIVATION, LIMIT, ALPHA, GATE_CAP, UP_CAP)


@triton.jit
def _half_and_half(first, INTER: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Rows of a tile and which exist: with a gate its rows are the first half, so that both of a
    unit are in one thread's registers."""
    unit = first + tl.arange(0, ROWS) % UNITS
    return unit + tl.arange(0, ROWS) // UNITS * INTER, unit < INTER


@triton.jit
def _up_kernel(
    x_TH,
    ids_N,
    address_E,
    fill_E,
    h_NI,
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
    TOP_K: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
    FILL: tl.constexpr,
    INTERPRET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    pair = tl.program_id(1)
    x_H = x_TH + pair // TOP_K * HIDDEN
    # Ahead of the wait, as ids and addresses: see `few_tokens`.
    x = first_inputs(x_H, M, ROWS, COLS, STEPS)
    expert, _, record = routed_record(ids_N, address_E, num_experts, pair)
    sharing = _sharing(ids_N, expert, NUM_PAIRS, PAIRS)
    # First, and apart: who ends here need not wait for the address.
    if _next_pair(sharing, -1, PAIRS) < pair:
        wait_for_previous(DEPENDENT)
        return
    if record == 0:
        wait_for_previous(DEPENDENT)
        return
    dtype: tl.constexpr = x_TH.dtype.element_ty
    units: tl.constexpr = ROWS // 2 if GATED else ROWS
    whole: tl.constexpr = INTER % units == 0
    unit = tl.program_id(0) * units + tl.arange(0, units)
    rows, inside = _half_and_half(tl.program_id(0) * units, INTER, ROWS, units)
    weights = first_weights(record, rows, inside, M, dtype, COLS, whole, STEPS)
    wait_for_previous(DEPENDENT)
    fill = fill_address(fill_E, expert, FILL)
    place = (record, fill, rows, inside)
    u = _held_sums(x_H, place, weights, x, M, BIAS, HAS_BIAS, ROWS, COLS, whole, FILL)
    while pair < PAIRS:
        h = _hidden(u, units, GATED, FORM, ACTIVATION, LIMIT, ALPHA, GATE_CAP, UP_CAP)
        tl.store(h_NI + pair * INTER + unit, round_to(h, dtype, INTERPRET), mask=unit < INTER)
        pair = _next_pair(sharing, pair, PAIRS)
        if pair < PAIRS:
            x_H = x_TH + pair // TOP_K * HIDDEN
            held = _again(weights, INTERPRET)
            u = _held_sums(x_H, place, held, (), M, BIAS, HAS_BIAS, ROWS, COLS, whole, False)


@triton.jit
def _end_without(y, zeroed, ROWS: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_previous(DEPENDENT)
    tl.store(y, tl.zeros((ROWS,), tl.float32), mask=zeroed)


@triton.jit
def _down_kernel(
    h_NI,
    ids_N,
    address_E,
    fill_E,
    y_NH,
    num_experts,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
    FILL: tl.constexpr,
    ZERO_ABSENT: tl.constexpr,
    INTERPRET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    pair = tl.program_id(1)
    expert, real, record = routed_record(ids_N, address_E, num_experts, pair)
    sharing = _sharing(ids_N, expert, NUM_PAIRS, PAIRS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < HIDDEN
    absent = (real == 0) | (ZERO_ABSENT & (record == 0))
    if _next_pair(sharing, -1, PAIRS) < pair:
        _end_without(y_NH + pair * HIDDEN + row, inside & absent, ROWS, DEPENDENT)
        return
    if record == 0:
        _end_without(y_NH + pair * HIDDEN + row, inside & absent, ROWS, DEPENDENT)
        return
    dtype: tl.constexpr = h_NI.dtype.element_ty
    whole: tl.constexpr = HIDDEN % ROWS == 0
    weights = first_weights(record, row, inside, M, dtype, COLS, whole, STEPS)
    # What the match wrote is there already: the first projection has waited for it.
    fill = fill_address(fill_E, expert, FILL)
    wait_for_previous(DEPENDENT)
    place, h_I = (record, fill, row, inside), h_NI + pair * INTER
    y = _held_sums(h_I, place, weights, (), M, BIAS, HAS_BIAS, ROWS, COLS, whole, FILL)
    while pair < PAIRS:
        tl.store(y_NH + pair * HIDDEN + row, y, mask=inside)
        pair = _next_pair(sharing, pair, PAIRS)
        if pair < PAIRS:
            held = _again(weights, INTERPRET)
            h_I = h_NI + pair * INTER
            y = _held_sums(h_I, place, held, (), M, BIAS, HAS_BIAS, ROWS, COLS, whole, False)


def few_tokens(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    address_E: torch.Tensor,
    spec: ExpertSpec,
    *,
    out: torch.Tensor | None = None,
    fill_E: torch.Tensor | None = None,
    behind_match: bool = False,
) -> torch.Tensor:
    """Expert outputs of a few tokens; see `dispatch.Kernels.expert_outputs`.

    What is read before the previous kernel has ended, and why that is safe, is as in
    `moe_decode.one_token`.
    """
    num_pairs, num_experts = ids_TK.numel(), address_E.numel()
    hidden, inter, halves = spec.hidden, spec.intermediate, 2 if spec.gate.has_gate else 1
    y_TKH = x_TH.new_empty(*ids_TK.shape, hidden, dtype=torch.float32) if out is None else out
    h_NI = x_TH.new_empty(num_pairs, inter)
    routed = (ids_TK, address_E, address_E if fill_E is None else fill_E)
    up = few_tokens_tile(x_TH.element_size(), inter, hidden, halves=halves)
    down = few_tokens_tile(x_TH.element_size(), hidden, inter)
    offset = {field.name: field.offset for field in spec.layout.fields}
    shared = {
        "INTER": inter,
        "HAS_BIAS": spec.has_bias,
        "NUM_PAIRS": num_pairs,
        "PAIRS": triton.next_power_of_2(num_pairs),
        "FILL": fill_E is not None,
        "INTERPRET": is_interpreted(_up_kernel),
    }
    dependent = dependent_launch(x_TH.device)
    _up_kernel[(triton.cdiv(inter, up.rows // halves), num_pairs)](
        x_TH,
        *routed,
        h_NI,
        num_experts,
        HIDDEN=hidden,
        TOP_K=ids_TK.shape[1],
        M=Matrix.of(spec, "up"),
        BIAS=offset.get("up_bias", 0),
        **gate_constants(spec.gate),
        **shared,
        **_launch_shape(up),
        **(dependent if behind_match else waiting_launch(dependent)),
    )
    _down_kernel[(triton.cdiv(hidden, down.rows), num_pairs)](
        h_NI,
        *routed,
        y_TKH,
        num_experts,
        HIDDEN=hidden,
        M=Matrix.of(spec, "down"),
        BIAS=offset.get("down_bias", 0),
        ZERO_ABSENT=out is None,
        **shared,
        **_launch_shape(down),
        **dependent,
    )
    return y_TKH


def _launch_shape(tile: Tile) -> dict[str, Any]:
    return {"ROWS": tile.rows, "COLS": tile.cols, "STEPS": tile.stages, "num_warps": tile.warps}
