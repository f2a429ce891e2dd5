"""Attention of a prompt's newest tokens to all before them, in flash form: one Triton launch.

    s_tp = scale * (q_t . k_p), then softcap * tanh(s / softcap) where there is a cap
    seen   p <= position of t, and p > position of t - window where there is a window
    out_t  = sum_p exp(s_tp) v_p / (sum_p exp(s_tp) + exp(sink))      the sink where there is one

A program owns a block of queries of one head and runs through the keys it sees with a running
maximum; no score leaves it. Sums in FP32; weights are rounded to the dtype of the values before
they meet them. Serves what torch's fused kernels do not: windows, caps, sinks, values wider than
keys, FP32. Bits depend on shapes alone.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hotset.kernels.device import dot, is_interpreted, load_tile, round_to, tanh
from hotset.kernels.launch import shared_memory_bytes

_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Launch:
    """A launch shape; a function of widths, dtype and device.

    Attributes:
        queries, keys: of one tile.
        warps: of a program.
        stages: key tiles in flight; it cannot change a bit.
    """

    queries: int
    keys: int
    warps: int
    stages: int


def launch_shape(key_dim: int, value_dim: int, element_bytes: int, shared_bytes: int) -> Launch:
    """A 128 x 128 accumulator is 64 registers a thread with eight warps; wider heads get fewer
    queries so that it stays there. FP32 products have no tensor core and take small tiles."""
    widest = max(key_dim, value_dim)
    if element_bytes == 4:
        queries, keys, warps = 32, 32, 4
    elif widest <= 128:
        queries, keys, warps = 128, 64, 8 if widest > 64 else 4
    else:
        queries, keys, warps = 64, 32, 8 if widest > 256 else 4
    step_bytes = keys * (key_dim + value_dim) * element_bytes
    stages = (shared_bytes - queries * key_dim * element_bytes) // step_bytes
    return Launch(queries, keys, warps, min(max(stages, 1), 3))


@triton.jit
def _attend_keys(
    q,
    k_PD,
    v_PD,
    k_stride,
    v_stride,
    position,
    start,
    stop,
    num_keys,
    scale,
    acc,
    top,
    total,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Takes the keys [start, stop) in; `MASKED` where a query of the tile may not see all of them.

    `top` is the running maximum in base 2, `total` the sum of weights, `acc` that of values.
    """
    kd = tl.arange(0, KEY_COLUMNS)
    vd = tl.arange(0, VALUE_COLUMNS)
    whole_k: tl.constexpr = (not MASKED) and KEY_DIM == KEY_COLUMNS
    whole_v: tl.constexpr = (not MASKED) and VALUE_DIM == VALUE_COLUMNS
    for first in range(start, stop, KEYS):
        p = first + tl.arange(0, KEYS)
        there = p < num_keys
        k_at = k_PD + p.to(tl.int64)[None, :] * k_stride + kd[:, None]
        k = load_tile(k_at, there[None, :] & (kd < KEY_DIM)[:, None], whole_k)
        s = dot(q, k, tl.zeros((QUERIES, KEYS), tl.float32), INTERPRET) * scale
        if SOFTCAP > 0:
            s = SOFTCAP * tanh(s / SOFTCAP)
        s = s * _LOG2_E
        if MASKED:
            seen = p[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (p[None, :] > position[:, None] - WINDOW)
            s = tl.where(seen, s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        # A query that has seen no key yet has no maximum either.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(s - base[:, None])
        faded = tl.exp2(top - base)
        total = total * faded + tl.sum(weight, 1)
        v_at = v_PD + p.to(tl.int64)[:, None] * v_stride + vd[None, :]
        v = load_tile(v_at, there[:, None] & (vd < VALUE_DIM)[None, :], whole_v)
        acc = dot(round_to(weight, v.dtype, INTERPRET), v, acc * faded[:, None], INTERPRET)
        top = higher
    return acc, top, total


@triton.jit
def _prefill_kernel(
    q_QTD, k_HPD, v_HPD, sinks_Q, out_TQD,
    q_head, q_token, k_head, k_token, v_head, v_token,
    num_queries, num_keys, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    # The blocks that see most keys begin first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    t = block * QUERIES + tl.arange(0, QUERIES)
    live = t < num_queries
    before = num_keys - num_queries
    position = before + t
    kd = tl.arange(0, KEY_COLUMNS)
    vd = tl.arange(0, VALUE_COLUMNS)
    q_at = q_QTD + head.to(tl.int64) * q_head + t.to(tl.int64)[:, None] * q_token + kd[None, :]
    q = tl.load(q_at, mask=live[:, None] & (kd < KEY_DIM)[None, :], other=0.0)
    k_PD = k_HPD + (head // GROUP).to(tl.int64) * k_head
    v_PD = v_HPD + (head // GROUP).to(tl.int64) * v_head

    # Keys in whole tiles: [begin, whole) at the edge of the window, [whole, edge) seen by every
    # query, [edge, stop) around the diagonal.
    lowest = before + block * QUERIES
    stop = tl.minimum(lowest + QUERIES, num_keys)
    begin = 0
    whole = 0
    edge = (lowest + 1) // KEYS * KEYS
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0) // KEYS * KEYS
        whole = tl.maximum((lowest + QUERIES - WINDOW + KEYS - 1) // KEYS * KEYS, begin)
        whole = tl.minimum(whole, tl.maximum(edge, begin))
        edge = tl.maximum(edge, whole)

    acc = tl.zeros((QUERIES, VALUE_COLUMNS), tl.float32)
    top = tl.full((QUERIES,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    if HAS_SINKS:
        top = tl.zeros((QUERIES,), tl.float32) + tl.load(sinks_Q + head).to(tl.float32) * _LOG2_E
        total += 1.0
    acc, top, total = _attend_keys(
        q, k_PD, v_PD, k_token, v_token, position, begin, whole, num_keys, scale, acc, top, total,
        KEY_DIM, VALUE_DIM, KEY_COLUMNS, VALUE_COLUMNS, QUERIES, KEYS, WINDOW, SOFTCAP, True,
        INTERPRET,
    )  # fmt: skip
    acc, top, total = _attend_keys(
        q, k_PD, v_PD, k_token, v_token, position, whole, edge, num_keys, scale, acc, top, total,
        KEY_DIM, VALUE_DIM, KEY_COLUMNS, VALUE_COLUMNS, QUERIES, KEYS, WINDOW, SOFTCAP, False,
        INTERPRET,
    )  # fmt: skip
    acc, top, total = _attend_keys(
        q, k_PD, v_PD, k_token, v_token, position, edge, stop, num_keys, scale, acc, top, total,
        KEY_DIM, VALUE_DIM, KEY_COLUMNS, VALUE_COLUMNS, QUERIES, KEYS, WINDOW, SOFTCAP, True,
        INTERPRET,
    )  # fmt: skip
    y = round_to(acc / total[:, None], out_TQD.dtype.element_ty, INTERPRET)
    out = out_TQD + (t.to(tl.int64)[:, None] * NUM_HEADS + head) * VALUE_DIM + vd[None, :]
    tl.store(out, y, mask=live[:, None] & (vd < VALUE_DIM)[None, :])


def prefill_attention(
    q_QTD: torch.Tensor,
    k_HPD: torch.Tensor,
    v_HPD: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, Hq, Dv] in the dtype of `q_QTD`; see `attention.AttentionKernels.prefill`."""
    (num_heads, num_queries, key_dim), (num_kv_heads, num_keys, value_dim) = (
        q_QTD.shape,
        v_HPD.shape,
    )
    key_columns = max(16, triton.next_power_of_2(key_dim))
    value_columns = max(16, triton.next_power_of_2(value_dim))
    limit = shared_memory_bytes(q_QTD.device)
    launch = launch_shape(key_columns, value_columns, q_QTD.element_size(), limit)
    out_TQD = q_QTD.new_empty(num_queries, num_heads, value_dim)
    _prefill_kernel[(triton.cdiv(num_queries, launch.queries), num_heads)](
        q_QTD,
        k_HPD,
        v_HPD,
        q_QTD if sinks_Q is None else sinks_Q,
        out_TQD,
        *q_QTD.stride()[:2],
        *k_HPD.stride()[:2],
        *v_HPD.stride()[:2],
        num_queries,
        num_keys,
        scale,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_COLUMNS=key_columns,
        VALUE_COLUMNS=value_columns,
        QUERIES=launch.queries,
        KEYS=launch.keys,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        HAS_SINKS=sinks_Q is not None,
        INTERPRET=is_interpreted(_prefill_kernel),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out_TQD
