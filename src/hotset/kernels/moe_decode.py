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
    up_rows,
)
from hotset.kernels.launch import (
    ONE_TOKEN_DOWN,
    ONE_TOKEN_DOWN_PACKED,
    ONE_TOKEN_UP,
    ONE_TOKEN_UP_PACKED,
    packed_one_token_tile,
)
from hotset.kernels.lossless import first_groups, lossless_row_sums
from hotset.kernels.moe_decode_packed import packed_down_kernel, packed_up_kernel
from hotset.kernels.packed import Matrix
from hotset.kernels.plain import first_weights, plain_row_sums


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
def _row_sums(
    vector,
    record,
    fill,
    rows,
    inside,
    begun,
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
            vector, record, fill, rows, inside, begun, M, ROWS, COLS, WHOLE, AHEAD, FILL
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
    CHOICES: tl.constexpr,
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
    expert = tl.load(ids_K + choice)
    real = (expert >= 0) & (expert < num_experts)
    record = tl.load(address_E + expert, mask=real, other=0)
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
    fill = fill_address(fill_E, ids_K, choice, expert, CHOICES, FILL)
    u = _row_sums(
        x_H, record, fill, rows, inside, begun, M, ROWS, COLS, whole, AHEAD, FILL, INTERPRET
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
    CHOICES: tl.constexpr,
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
    expert = tl.load(ids_K + choice)
    real = (expert >= 0) & (expert < num_experts)
    record = tl.load(address_E + expert, mask=real, other=0)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < HIDDEN
    out = y_KH + choice * HIDDEN + rows
    if record == 0:
        wait_for_previous(DEPENDENT)
        zeroed = (real == 0) | ZERO_ABSENT
        tl.store(out, tl.zeros((ROWS,), tl.float32), mask=inside & zeroed)
        return
    dtype: tl.constexpr = h_KI.dtype.element_ty
    whole: tl.constexpr = HIDDEN % ROWS == 0
    begun = _begin(record, rows, inside, M, dtype, COLS, whole, AHEAD)
    # What the match wrote is there already: the first projection has waited for it.
    fill = fill_address(fill_E, ids_K, choice, expert, CHOICES, FILL)
    wait_for_previous(DEPENDENT)
    h_I = h_KI + choice * INTER
    y = _row_sums(
        h_I, record, fill, rows, inside, begun, M, ROWS, COLS, whole, AHEAD, FILL, INTERPRET
    )
    if HAS_BIAS:
        y += load_bias(record, fill, rows, inside, BIAS, dtype, whole, FILL)
    tl.store(out, y, mask=inside)


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

    The first weights are read before the previous kernel has ended. For the second projection that
    is the first one, for the first one the match; who else may have written the ids is waited for.
    """
    choices, num_experts = ids_1K.numel(), address_E.numel()
    hidden, inter, gated = spec.hidden, spec.intermediate, spec.gate.has_gate
    y_1KH = x_1H.new_empty(1, choices, hidden, dtype=torch.float32) if out is None else out
    h_KI = x_1H.new_empty(choices, inter)
    up_kernel, up = _projection(spec, "up", x_1H)
    down_kernel, down = _projection(spec, "down", x_1H)
    units = up["ROWS"] // 2 if gated else up["ROWS"]
    routed = (ids_1K, address_E, address_E if fill_E is None else fill_E)
    shared = _shared_constants(spec, choices, fill=fill_E is not None)
    dependent = dependent_launch(x_1H.device)
    up_kernel[(triton.cdiv(inter, units), choices)](
        x_1H,
        *routed,
        h_KI,
        num_experts,
        **up,
        **shared,
        **gate_constants(spec.gate),
        **(dependent if behind_match else waiting_launch(dependent)),
    )
    down_kernel[(triton.cdiv(hidden, down["ROWS"]), choices)](
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


def _shared_constants(spec: ExpertSpec, choices: int, *, fill: bool) -> dict[str, Any]:
    """What both kernels are compiled for, whatever their tiles."""
    return {
        "HIDDEN": spec.hidden,
        "INTER": spec.intermediate,
        "CHOICES": triton.next_power_of_2(choices),
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
        pipeline = {"AHEAD": tile.stages, "num_stages": tile.stages}
    else:
        kernel = packed_up_kernel if is_up else packed_down_kernel
        table = ONE_TOKEN_UP_PACKED if is_up else ONE_TOKEN_DOWN_PACKED
        tile = packed_one_token_tile(table[matrix.per_word], matrix.columns, matrix.per_word)
        pipeline = {"AHEAD": min(tile.stages, triton.cdiv(matrix.columns, tile.cols))}
    offset = {field.name: field.offset for field in spec.layout.fields}
    return kernel, pipeline | {
        "M": matrix,
        "BIAS": offset.get(f"{name}_bias", 0),
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "num_warps": tile.warps,
    }
