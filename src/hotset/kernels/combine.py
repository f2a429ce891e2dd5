"""Routed outputs to layer output: out_t = round(sum over k of weights[t, k] * y[t, k]).

The sum runs in FP32 in ascending k. Knows nothing of experts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotset.kernels.device import is_interpreted, round_to

_BLOCK_H = 512


@triton.jit
def _combine_kernel(
    y_TKH,
    weights_TK,
    out_TH,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = h < HIDDEN
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for k in range(TOP_K):
        weight = tl.load(weights_TK + token * TOP_K + k).to(tl.float32)
        acc += weight * tl.load(y_TKH + (token * TOP_K + k) * HIDDEN + h, mask=inside, other=0.0)
    rounded = round_to(acc, out_TH.dtype.element_ty, INTERPRET)
    tl.store(out_TH + token * HIDDEN + h, rounded, mask=inside)


def combine(y_TKH: torch.Tensor, weights_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The layer's output [T, H] in `dtype`; see `dispatch.Kernels.combine`."""
    num_tokens, top_k, hidden = y_TKH.shape
    out_TH = y_TKH.new_empty(num_tokens, hidden, dtype=dtype)
    _combine_kernel[(num_tokens, triton.cdiv(hidden, _BLOCK_H))](
        y_TKH,
        weights_TK,
        out_TH,
        HIDDEN=hidden,
        TOP_K=top_k,
        BLOCK_H=_BLOCK_H,
        INTERPRET=is_interpreted(_combine_kernel),
        num_warps=4,
    )
    return out_TH
