"""Device functions that the expert kernels share: reading a record, rounding, dots and gates.

Each works on tiles in registers. Knows nothing of experts, tokens or grids, and launches
nothing. Everything here also runs in Triton's interpreter (`INTERPRET`), which has two silent
errors that are worked around in one place each: `round_to` and `dot_rows`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hotset.core.geometry import Gate


def is_interpreted(kernel: Any) -> bool:
    """Whether a `@triton.jit` function was made for the interpreter (`TRITON_INTERPRET=1`)."""
    return not isinstance(kernel, triton.runtime.JITFunction)


def gate_constants(gate: Gate) -> dict[str, Any]:
    """The compile-time arguments by which a kernel knows its gate."""
    return {
        "GATED": gate.has_gate,
        "FORM": gate.form.value,
        "ACTIVATION": gate.activation.value,
        "LIMIT": gate.limit,
        "ALPHA": gate.alpha,
        "GATE_CAP": gate.gate_cap,
        "UP_CAP": gate.up_cap,
    }


@triton.jit
def field_pointer(record, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer to the field that lies `OFFSET` bytes into the record at address `record` (int64).

    The hint is what lets the compiler use 16-byte loads; records and fields are aligned to more.
    """
    return tl.multiple_of((record + OFFSET).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def fill_address(fill_E, expert, FILL: tl.constexpr):
    """Slot to fill with what is read of an expert, 0 for none.

    Of equal ids, which no router gives, each fills: the same bytes to the same places. To look for
    them first took as long as a trip to memory, in front of every load behind it.
    """
    fill = tl.full((), 0, tl.int64)
    if FILL:
        fill = tl.load(fill_E + expert)
    return fill


@triton.jit
def routed_record(ids_K, address_E, num_experts, choice):
    """(expert of a choice, whether it is no padding, address of its record or 0)."""
    expert = tl.load(ids_K + choice).to(tl.int64)
    real = expert.to(tl.uint64) < num_experts  # ids below 0 as well
    return expert, real, tl.load(address_E + expert, mask=real, other=0)


@triton.jit
def load_tile(pointers, inside, WHOLE: tl.constexpr):
    """A tile, zero where not `inside`; `WHOLE` says that every tile of this shape is inside."""
    if WHOLE:  # noqa: SIM108 (a conditional expression would not be folded)
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def load_weights(source, target, offsets, inside, fill, WHOLE: tl.constexpr, FILL: tl.constexpr):
    """A weight tile; where `fill` (an address) is not 0 it is also stored at the same offsets."""
    tile = load_tile(source + offsets, inside, WHOLE)
    if FILL:  # noqa: SIM102 (known when compiled; the inner one is not)
        if fill != 0:
            tl.store(target + offsets, tile, mask=inside)
    return tile


@triton.jit
def load_bias(
    record,
    fill,
    rows,
    inside,
    OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    FILL: tl.constexpr,
):
    """The bias of `rows` in FP32; also stored to the slot at `fill` where that is not 0."""
    source = field_pointer(record, OFFSET, DTYPE)
    target = field_pointer(fill, OFFSET, DTYPE)
    return load_weights(source, target, rows, inside, fill, WHOLE, FILL).to(tl.float32)


@triton.jit
def up_rows(first, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Rows of the first projection for one tile, and whether each exists.

    With a gate, row g of the gate half is followed by row g of the up half: the two then sit in
    neighbouring registers of one thread, and `apply_gate` needs no exchange between threads.

    Args:
        first: first intermediate unit of the tile.
        NUM_ROWS: I.
        ROWS: rows of the tile, two for each unit when gated.
    """
    r = tl.arange(0, ROWS)
    if GATED:
        unit = first + r // 2
        rows = unit + (r % 2) * NUM_ROWS
    else:
        unit = first + r
        rows = unit
    return rows, unit < NUM_ROWS


@triton.jit
def dot(x, w, acc, INTERPRET: tl.constexpr):
    """acc + x @ w in FP32, IEEE for FP32 operands.

    The interpreter keeps BF16 as its bit pattern in uint16 and multiplies those numbers; FP32
    operands are exact there, as every product of two 8-bit or 11-bit significands is.
    """
    if INTERPRET:
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    return tl.dot(x, w, acc, input_precision="ieee")


@triton.jit
def dot_rows(x, w, acc, INTERPRET: tl.constexpr):
    """acc_TR + x_TC @ w_RC^T; see `dot`."""
    return dot(x, tl.trans(w), acc, INTERPRET)


@triton.jit
def round_to(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """FP32 to `DTYPE`, to nearest even; the interpreter truncates to BF16, hence the bits."""
    if INTERPRET and DTYPE == tl.bfloat16:  # noqa: SIM300
        is_nan = x != x  # noqa: PLR0124
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(is_nan, x, nearest.to(tl.float32, bitcast=True))
    return x.to(DTYPE)


@triton.jit
def tanh(x):
    """tanh in FP32 to about 1 ulp: Cephes `tanhf`, a polynomial near 0 where 1 - exp cancels."""
    s = x * x
    p = -5.70498872745e-3
    p = p * s + 2.06390887954e-2
    p = p * s - 5.37397155531e-2
    p = p * s + 1.33314422036e-1
    p = p * s - 3.33332819422e-1
    near = p * s * x + x
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def _at_most(x, limit):
    # NaN must come through: a poisoned slot that is read by mistake has to show.
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _at_least(x, limit):
    return tl.maximum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """a(x) of `core.geometry.Activation`, FP32."""
    if ACTIVATION == "silu":
        out = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is sigmoid(2z), z = sqrt(2/pi) * (x + 0.044715 x^3)
        out = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert((ACTIVATION == "relu") | (ACTIVATION == "relu2"))
        out = _at_least(x, 0.0)
        if ACTIVATION == "relu2":
            out = out * out
    return out


@triton.jit
def apply_gate(
    g,
    u,
    FORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
):
    """The gate of `core.geometry.GateForm` in FP32; without a gate `g` is ignored."""
    if FORM == "none":
        out = activate(u, ACTIVATION)
    elif FORM == "plain":
        out = activate(g, ACTIVATION) * u
    elif FORM == "clamped":
        out = activate(_at_most(g, LIMIT), ACTIVATION) * _at_least(_at_most(u, LIMIT), -LIMIT)
    elif FORM == "swiglu_oai":
        g = _at_most(g, LIMIT)
        out = g * tl.sigmoid(ALPHA * g) * (_at_least(_at_most(u, LIMIT), -LIMIT) + 1.0)
    elif FORM == "clamped_after":
        out = _at_most(activate(g, ACTIVATION), LIMIT) * _at_least(_at_most(u, LIMIT), -LIMIT)
    else:
        tl.static_assert(FORM == "softcapped")
        capped = GATE_CAP * tanh(g / GATE_CAP)
        out = capped * tl.sigmoid(g) * (UP_CAP * tanh(u / UP_CAP))
    return out
