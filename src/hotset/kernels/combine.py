"""Routed outputs to layer output: out_t = round(sum over k of weights[t, k] * y[t, k]).

The sum runs in FP32 in ascending k. Knows nothing of experts, but carries out a layer's `retarget`
in a program of its own: this launch is behind the kernels that fill slots, and runs anyway.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment"
# (tuples that grow)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotset.kernels.dependent import dependent_launch, wait_for_previous
from hotset.kernels.device import is_interpreted, round_to
from hotset.kernels.match import retarget
from hotset.kernels.match_reference import LayerMatch

_BLOCK_H = 256


@triton.jit
def _combine_block(
    y_TKH,
    weights_TK,
    out_TH,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERPRET: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if not EARLY:
        wait_for_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    weights = ()
    for k in tl.static_range(TOP_K):
        weights += (tl.load(weights_TK + token * TOP_K + k).to(tl.float32),)
    if EARLY:
        wait_for_previous(DEPENDENT)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = h < HIDDEN
    outputs = ()
    for k in tl.static_range(TOP_K):
        y = y_TKH + (token * TOP_K + k) * HIDDEN + h
        outputs += (tl.load(y, mask=inside, other=0.0),)
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for k in tl.static_range(TOP_K):
        acc += weights[k] * outputs[k]
    rounded = round_to(acc, out_TH.dtype.element_ty, INTERPRET)
    tl.store(out_TH + token * HIDDEN + h, rounded, mask=inside)


@triton.jit
def _combine_kernel(
    y_TKH,
    weights_TK,
    out_TH,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERPRET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    _combine_block(y_TKH, weights_TK, out_TH, HIDDEN, TOP_K, BLOCK_H, INTERPRET, False, DEPENDENT)


@triton.jit
def _combine_and_retarget_kernel(
    y_TKH,
    weights_TK,
    out_TH,
    address_W,
    host_address_W,
    fill_E,
    evict_V,
    num_tokens,
    num_experts,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERPRET: tl.constexpr,
    NUM_VICTIMS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if tl.program_id(0) < num_tokens:
        _combine_block(
            y_TKH, weights_TK, out_TH, HIDDEN, TOP_K, BLOCK_H, INTERPRET, EARLY, DEPENDENT
        )
    elif tl.program_id(1) == 0:
        retarget(
            address_W,
            host_address_W,
            fill_E,
            evict_V,
            num_experts,
            NUM_VICTIMS,
            BLOCK_E,
            BLOCK_V,
            EARLY,
            DEPENDENT,
        )
    else:
        wait_for_previous(DEPENDENT)


def combine(
    y_TKH: torch.Tensor,
    weights_TK: torch.Tensor,
    dtype: torch.dtype,
    *,
    matched: LayerMatch | None = None,
    behind_experts: bool = False,
) -> torch.Tensor:
    """The layer's output [T, H] in `dtype`; see `dispatch.Kernels.combine`.

    `behind_experts` the weights, and what the match found, are read ahead of the wait: the kernel
    before this one is of the experts, and it began when whatever wrote them was complete.
    """
    num_tokens, top_k, hidden = y_TKH.shape
    out_TH = y_TKH.new_empty(num_tokens, hidden, dtype=dtype)
    blocks = triton.cdiv(hidden, _BLOCK_H)
    shared = {
        "HIDDEN": hidden,
        "TOP_K": top_k,
        "BLOCK_H": _BLOCK_H,
        "INTERPRET": is_interpreted(_combine_kernel),
        "num_warps": 4,
        **dependent_launch(y_TKH.device),
    }
    if matched is None:
        _combine_kernel[(num_tokens, blocks)](y_TKH, weights_TK, out_TH, **shared)
        return out_TH
    _combine_and_retarget_kernel[(num_tokens + 1, blocks)](
        y_TKH,
        weights_TK,
        out_TH,
        matched.address_W,
        matched.host_address_W,
        matched.fill_E,
        matched.evict_V,
        num_tokens,
        matched.num_experts,
        NUM_VICTIMS=matched.num_victims,
        BLOCK_E=triton.next_power_of_2(matched.num_experts),
        BLOCK_V=triton.next_power_of_2(matched.num_victims),
        EARLY=behind_experts,
        **shared,
    )
    return out_TH
