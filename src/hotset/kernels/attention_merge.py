"""Two attentions of the same queries to different keys become the attention to all of them.

    a = sum over keys of the one, l_a = log sum exp of its scores; b and l_b of the other
    out = (exp(l_a - m) a + exp(l_b - m) b) / (exp(l_a - m) + exp(l_b - m)),    m = max(l_a, l_b)

    l = m + log(exp(l_a - m) + exp(l_b - m))    of both, to go on with

In FP32 and in this order, rounded once. Knows nothing of keys.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotset.kernels.device import is_interpreted, round_to

# Rows of a program: (query, head) pairs.
_ROWS = 16


@triton.jit
def _merge_kernel(
    a_TQD,
    a_log_QT,
    b_TQD,
    b_log_QT,
    out_TQD,
    num_rows,
    a_token,
    a_head,
    b_token,
    b_head,
    out_token,
    out_head,
    num_queries,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    t, head = row // NUM_HEADS, row % NUM_HEADS
    a_log = tl.load(a_log_QT + head * num_queries + t, mask=live, other=0.0)
    b_log = tl.load(b_log_QT + head * num_queries + t, mask=live, other=0.0)
    most = tl.maximum(a_log, b_log)
    a_weight, b_weight = tl.exp(a_log - most), tl.exp(b_log - most)
    d = tl.arange(0, COLUMNS)
    inside = live[:, None] & (d < DIM)[None, :]
    a_at = a_TQD + t[:, None] * a_token + head[:, None] * a_head + d[None, :]
    b_at = b_TQD + t[:, None] * b_token + head[:, None] * b_head + d[None, :]
    a = tl.load(a_at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_at, mask=inside, other=0.0).to(tl.float32)
    merged = (a_weight[:, None] * a + b_weight[:, None] * b) / (a_weight + b_weight)[:, None]
    out_at = out_TQD + t[:, None] * out_token + head[:, None] * out_head + d[None, :]
    tl.store(out_at, round_to(merged, out_TQD.dtype.element_ty, INTERPRET), mask=inside)
    tl.store(a_log_QT + head * num_queries + t, most + tl.log(a_weight + b_weight), mask=live)


def merge(
    a_TQD: torch.Tensor,
    a_log_QT: torch.Tensor,
    b_TQD: torch.Tensor,
    b_log_QT: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Merges attention to some keys with attention to others.

    Args:
        a_TQD: [T, Hq, D].
        a_log_QT: FP32 [Hq, T], natural logarithms, contiguous; becomes that of both.
        b_TQD, b_log_QT: the same of the other keys.
        dtype: of the result.

    Returns:
        [T, Hq, D] in the place of the first of the two that has this dtype, or in a place of its
        own.
    """
    num_queries, num_heads, dim = a_TQD.shape
    assert a_TQD.shape == b_TQD.shape
    assert a_log_QT.shape == b_log_QT.shape == (num_heads, num_queries)
    assert a_log_QT.dtype == b_log_QT.dtype == torch.float32
    assert a_log_QT.is_contiguous() and b_log_QT.is_contiguous()
    assert a_TQD.stride(2) == b_TQD.stride(2) == 1
    num_rows = num_queries * num_heads
    out_TQD = next((x for x in (a_TQD, b_TQD) if x.dtype == dtype), None)
    if out_TQD is None:
        out_TQD = torch.empty_like(a_TQD, dtype=dtype)
    _merge_kernel[(triton.cdiv(num_rows, _ROWS),)](
        *(a_TQD, a_log_QT, b_TQD, b_log_QT, out_TQD, num_rows),
        *(*a_TQD.stride()[:2], *b_TQD.stride()[:2], *out_TQD.stride()[:2]),
        num_queries,
        NUM_HEADS=num_heads,
        DIM=dim,
        COLUMNS=triton.next_power_of_2(dim),
        ROWS=_ROWS,
        INTERPRET=is_interpreted(_merge_kernel),
        num_warps=4,
    )
    return out_TQD
