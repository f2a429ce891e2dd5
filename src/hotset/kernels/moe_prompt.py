"""Prompts: experts first .. stop - 1 on their tokens, added to each token's running sum.

    u = W_up x (+ up_bias); h = round(gate(u)); y = W_down h (+ down_bias)
    sum_t += weights[t, k] * y[t, k], for the range's k in ascending order; all sums in FP32
    out_t = round(sum_t), behind the last expert that the token has

A grouped GEMM over the blocks of a range (`ranges`), by as many programs as the device runs at a
time, each of which takes tiles in turn: the launch for a few experts costs what those cost, and a
window without blocks next to nothing. `h` and `y` lie by place within the window. Knows addresses,
not where they lead; ranges and windows cannot change a bit.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from hotset.core.geometry import ExpertSpec
from hotset.kernels.device import (
    apply_gate,
    gate_constants,
    is_interpreted,
    load_bias,
    round_to,
    up_rows,
)
from hotset.kernels.launch import resident_programs, shared_memory_bytes
from hotset.kernels.moe_grouped import (
    block_and_tile,
    block_pairs,
    block_products,
    launch_shape,
    matrix_tile,
    shared_constants,
)
from hotset.kernels.packed import Matrix
from hotset.kernels.ranges import NumBlocks, Ranges
from hotset.kernels.relaunch import Relaunch

_BLOCK_H = 2048


@triton.jit
def _window(first_block, block_start, first, stop, skip, size):
    """(first block, behind the last one, place of the first pair) of a window."""
    begin = tl.load(first_block + first) + skip
    end = tl.minimum(tl.load(first_block + stop), begin + size)
    return begin, end, tl.load(block_start + begin, mask=begin < end, other=0)


# A window is data: a program of its own for some of its values might round another way. So is where
# addresses begin, which are those of any range of experts.
@triton.jit(
    do_not_specialize=["first", "stop", "skip", "size"],
    do_not_specialize_on_alignment=["address_E"],
)
def _up_range_kernel(
    x_TH,
    order_N,
    bounds,
    block_expert,
    block_start,
    first_block,
    address_E,
    h_RI,
    first,
    stop,
    skip,
    size,
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
    tiles: tl.constexpr = (INTER + units - 1) // units
    whole: tl.constexpr = INTER % units == 0
    begin, end, first_place = _window(first_block, block_start, first, stop, skip, size)
    for program in range(tl.program_id(0), (end - begin) * tiles, tl.num_programs(0)):
        block, tile = block_and_tile(program, end - begin, tiles, GROUP)
        expert = tl.load(block_expert + begin + block)
        record = tl.load(address_E + expert)
        if record != 0:
            start = tl.load(block_start + begin + block)
            place, pair, live = block_pairs(order_N, bounds, start, expert, TOKENS)
            rows, inside = up_rows(tile * units, INTER, ROWS, GATED)
            x_T = x_TH + (pair // TOP_K).to(tl.int64) * HIDDEN
            u = block_products(
                x_T, record, record, rows, inside, M, TOKENS, ROWS, COLS, whole, FILL, INTERPRET
            )
            if HAS_BIAS:
                u += load_bias(record, record, rows, inside, BIAS, dtype, whole, FILL)[None, :]
            g = u
            if GATED:
                g, u = tl.split(tl.reshape(u, (TOKENS, units, 2)))
            h = apply_gate(g, u, FORM, ACTIVATION, LIMIT, ALPHA, GATE_CAP, UP_CAP)
            unit = tile * units + tl.arange(0, units)
            out = h_RI + (place - first_place).to(tl.int64)[:, None] * INTER + unit[None, :]
            kept = live[:, None] & (unit < INTER)[None, :]
            tl.store(out, round_to(h, dtype, INTERPRET), mask=kept)


@triton.jit(
    do_not_specialize=["first", "stop", "skip", "size"],
    do_not_specialize_on_alignment=["address_E"],
)
def _down_range_kernel(
    h_RI,
    bounds,
    block_expert,
    block_start,
    first_block,
    address_E,
    y_RH,
    first,
    stop,
    skip,
    size,
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
    INTERPRET: tl.constexpr,
):
    dtype: tl.constexpr = h_RI.dtype.element_ty
    tiles: tl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    whole: tl.constexpr = HIDDEN % ROWS == 0
    begin, end, first_place = _window(first_block, block_start, first, stop, skip, size)
    for program in range(tl.program_id(0), (end - begin) * tiles, tl.num_programs(0)):
        block, tile = block_and_tile(program, end - begin, tiles, GROUP)
        expert = tl.load(block_expert + begin + block)
        record = tl.load(address_E + expert)
        if record != 0:
            row = tl.load(block_start + begin + block) - first_place
            num_rows = tl.load(bounds + expert + 1) - first_place - row
            token = tl.arange(0, TOKENS)
            rows = tile * ROWS + tl.arange(0, ROWS)
            inside = rows < HIDDEN
            # Rows beyond the expert's are computed as its first one, and not stored.
            h_T = h_RI + (row + tl.where(token < num_rows, token, 0)).to(tl.int64) * INTER
            y = block_products(
                h_T, record, record, rows, inside, M, TOKENS, ROWS, COLS, whole, FILL, INTERPRET
            )
            if HAS_BIAS:
                y += load_bias(record, record, rows, inside, BIAS, dtype, whole, FILL)[None, :]
            out = y_RH + (row + token).to(tl.int64)[:, None] * HIDDEN + rows[None, :]
            tl.store(out, y, mask=(token < num_rows)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["first", "stop", "skip", "size", "num_experts"])
def _accumulate_kernel(
    y_RH,
    place_TK,
    weights_TK,
    bounds,
    block_start,
    first_block,
    sum_TH,
    out_TH,
    first,
    stop,
    skip,
    size,
    num_experts,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    begin, end, first_place = _window(first_block, block_start, first, stop, skip, size)
    if begin >= end:
        return
    # Behind the range's last block comes another expert's, or none.
    is_last = end == tl.load(first_block + stop)
    inner = tl.load(block_start + end, mask=end < tl.load(first_block + stop), other=0)
    end_place = tl.where(is_last, tl.load(bounds + stop), inner)

    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, CHOICES)
    places = tl.load(place_TK + token * TOP_K + choice, mask=choice < TOP_K, other=2**31 - 1)
    # A row's places ascend, padding last: choices of the window follow each other, with none
    # before them nothing has been added yet, and with none behind them the sum is whole.
    before = tl.sum((places < first_place).to(tl.int32))
    behind = tl.sum((places < end_place).to(tl.int32))
    if before == behind:
        return
    ends = behind == tl.sum((places < tl.load(bounds + num_experts)).to(tl.int32))
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = h < HIDDEN
    row = token * HIDDEN + h
    acc = tl.load(sum_TH + row, mask=inside & (before > 0), other=0.0)
    for k in range(before, behind):
        place = tl.load(place_TK + token * TOP_K + k)
        weight = tl.load(weights_TK + token * TOP_K + k).to(tl.float32)
        y = y_RH + (place - first_place).to(tl.int64) * HIDDEN + h
        acc += weight * tl.load(y, mask=inside, other=0.0)
    if ends:
        tl.store(out_TH + row, round_to(acc, out_TH.dtype.element_ty, INTERPRET), mask=inside)
    else:
        tl.store(sum_TH + row, acc, mask=inside)


def add_experts(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    address_E: torch.Tensor,
    spec: ExpertSpec,
    *,
    ranges: Ranges,
    first: int,
    stop: int,
    sum_TH: torch.Tensor,
    out_TH: torch.Tensor,
    num_blocks: NumBlocks = None,
    post_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Adds a range of experts to its tokens' sums; see `dispatch.Kernels.add_experts`."""
    h_RI = x_TH.new_empty(ranges.most_rows, spec.intermediate)
    y_RH = x_TH.new_empty(ranges.most_rows, spec.hidden, dtype=torch.float32)
    for skip, size in ranges.windows(num_blocks):
        window = (first, stop, skip, size)
        expert_rows(x_TH, address_E, spec, ranges=ranges, window=window, h_RI=h_RI, y_RH=y_RH)
        normed_RH = y_RH
        if post_norm is not None:
            normed_RH = post_norm(y_RH.to(x_TH.dtype)).float()
        accumulate(
            normed_RH, weights_TK, ranges=ranges, window=window, sum_TH=sum_TH, out_TH=out_TH
        )


def expert_rows(
    x_TH: torch.Tensor,
    address_E: torch.Tensor,
    spec: ExpertSpec,
    *,
    ranges: Ranges,
    window: tuple[int, int, int, int],
    h_RI: torch.Tensor,
    y_RH: torch.Tensor,
) -> None:
    """Outputs of one window's pairs, by place.

    Args:
        window: (first, stop) of the experts, and of `Ranges.windows`.
        h_RI, y_RH: written; rows beyond the window's pairs are left as they are.
    """
    grouping = ranges.grouping
    top_k = ranges.ids_TK.shape[1]
    up, down = _launches(spec, x_TH.dtype, top_k, grouping.block_tokens, x_TH.device)
    blocks = (grouping.block_expert_B, grouping.block_start_B, ranges.first_block, address_E)
    read = (x_TH, grouping.order_N, grouping.bounds, *blocks)
    up.run(up.grid(window[3]), (*read, h_RI), window)
    down.run(down.grid(window[3]), (h_RI, grouping.bounds, *blocks, y_RH), window)


def accumulate(
    y_RH: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    ranges: Ranges,
    window: tuple[int, int, int, int],
    sum_TH: torch.Tensor,
    out_TH: torch.Tensor,
) -> None:
    """Adds the outputs of a window to its tokens' sums; arguments as of `expert_rows`, and
    `sum_TH` and `out_TH` as of `dispatch.Kernels.add_experts`."""
    num_tokens, top_k = ranges.place_TK.shape
    hidden, grouping = y_RH.shape[1], ranges.grouping
    places = (grouping.bounds, grouping.block_start_B, ranges.first_block)
    _accumulates(hidden, top_k)(
        (num_tokens, triton.cdiv(hidden, _BLOCK_H)),
        (y_RH, ranges.place_TK, weights_TK, *places, sum_TH, out_TH),
        (*window, grouping.num_experts),
    )


@cache
def _accumulates(hidden: int, top_k: int) -> Relaunch:
    constants = {
        "HIDDEN": hidden,
        "TOP_K": top_k,
        "CHOICES": triton.next_power_of_2(top_k),
        "BLOCK_H": min(_BLOCK_H, triton.next_power_of_2(hidden)),
        "INTERPRET": is_interpreted(_accumulate_kernel),
        "num_warps": 4,
    }
    return Relaunch(_accumulate_kernel, constants)


@dataclass(frozen=True)
class _Launch:
    """How a kernel runs, whatever the prompt.

    Attributes:
        tiles: of a block.
        most_programs: that run at a time.
        run: launches it.
    """

    tiles: int
    most_programs: int
    run: Relaunch

    def grid(self, num_blocks: int) -> tuple[int]:
        """No more programs than run at a time."""
        return (max(1, min(num_blocks * self.tiles, self.most_programs)),)


@cache  # a layer of a prompt asks for it dozens of times, and it takes as long as the launches
def _launches(
    spec: ExpertSpec, dtype: torch.dtype, top_k: int, block_tokens: int, device: torch.device
) -> tuple[_Launch, _Launch]:
    """Of the first projection and of the second."""
    shared_bytes, launches = shared_memory_bytes(device), []
    offset = {field.name: field.offset for field in spec.layout.fields}
    for name, kernel in (("up", _up_range_kernel), ("down", _down_range_kernel)):
        matrix = Matrix.of(spec, name)
        tile = matrix_tile(matrix, dtype.itemsize, block_tokens, device, fill=False)
        rows, own = spec.hidden, {}
        if name == "up":
            rows, own = spec.intermediate, {"TOP_K": top_k, **gate_constants(spec.gate)}
            if spec.gate.has_gate:
                rows *= 2
        each = resident_programs(tile, dtype.itemsize, block_tokens, shared_bytes)
        constants = {
            "M": matrix,
            "BIAS": offset.get(f"{name}_bias", 0),
            **shared_constants(spec, block_tokens, fill=False),
            **launch_shape(tile),
            **own,
        }
        most = each * _num_processors(device)
        run = Relaunch(kernel, constants)
        launches.append(_Launch(triton.cdiv(rows, tile.rows), most, run))
    up, down = launches
    return up, down


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # of the interpreter: a few, so that each takes tiles in turn
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
