"""Decode attention over a pool of KV blocks, split along the context: two Triton launches.

    partial  one program for each (split of the context, KV head, row): max m, sum l of
             exp(s - m) and acc = sum exp(s - m) v over its positions, FP32, s as in
             `attention_reference`
    reduce   out = sum e^(m_i - M) acc_i / (sum e^(m_i - M) l_i + e^(sink - M)), splits in order

How a row is cut depends on its own length and on shapes, never on the capacity of the table, the
place of a block or the other rows; so neither do the bits. All sizes on the host come from shapes:
nothing waits for the device, and programs without positions leave at once.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hotset.kernels.dependent import dependent_launch, wait_for_previous
from hotset.kernels.device import dot, is_interpreted, round_to, tanh
from hotset.kernels.kv_fp8 import decode_rows

_LOG2_E = tl.constexpr(1.4426950408889634)
# One tile holds this many bytes of keys, and as many of values. With two tiles in flight a program
# takes 38 KiB of shared memory and 96 registers a thread (sm_90, BF16, head dim 128): five share a
# multiprocessor. Of twice the tile three do, so that `_PROGRAMS` would run in two waves.
_TILE_BYTES = 8 * 1024
# KV heads times splits: four programs for each multiprocessor of a large card (132 on an H200), so
# that one row alone keeps the whole memory system busy in one wave.
_PROGRAMS = 512
# A reducing program holds this many partial values.
_REDUCE_VALUES = 8 * 1024


@dataclass(frozen=True)
class Launch:
    """How one attention shape is cut; a function of shapes and dtype alone.

    Attributes:
        tile: positions of one step.
        splits: most parts that a row is cut into; a part is a whole number of tiles.
        rows: query heads of one KV head, padded to what a tensor core takes.
        reduce_columns: columns of the output that one reducing program sums.
        warps: of a partial program.
        stages: of the loop over tiles, as the compiler counts them: five keep two tiles in flight,
            since block ids come a stage before their tile. It cannot change a bit.
    """

    tile: int
    splits: int
    rows: int
    reduce_columns: int
    warps: int = 4
    stages: int = 5


def launch_shape(
    *, num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, element_bytes: int
) -> Launch:
    """The launch of an attention shape; the same for every batch, length and capacity."""
    columns = _columns(max(key_dim, value_dim))
    splits = triton.next_power_of_2(_PROGRAMS // num_kv_heads)
    splits = min(max(splits, 16), 256)
    return Launch(
        tile=min(max(_TILE_BYTES // (columns * element_bytes), 16), 128),
        splits=splits,
        rows=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        reduce_columns=min(_REDUCE_VALUES // splits, _columns(value_dim)),
    )


def _columns(head_dim: int) -> int:
    """A head padded to what a tile takes: a power of two, at least the 16 of a tensor core."""
    return int(max(16, triton.next_power_of_2(head_dim)))


def most_splits(launch: Launch, capacity_tokens: int, window: int | None) -> int:
    """Splits that can have positions at all, whatever the lengths: the size of the grid."""
    tiles: int = triton.cdiv(capacity_tokens, launch.tile)
    if window is not None:
        # It need not begin with a tile, hence the one more.
        tiles = triton.cdiv(min(window, capacity_tokens) - 1, launch.tile) + 1
    return min(launch.splits, tiles)


def workspace_bytes(launch: Launch, *, batch: int, num_heads: int, value_dim: int) -> int:
    """Bytes of partial results in one call at most, freed when it returns."""
    return 4 * batch * num_heads * launch.splits * (value_dim + 2)


@triton.jit
def parts_of(length, WINDOW: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """(first position, first tile, number of tiles, tiles of one split) of a row."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    first_tile = first // TILE
    num_tiles = (length + TILE - 1) // TILE - first_tile
    return first, first_tile, num_tiles, (num_tiles + SPLITS - 1) // SPLITS


@triton.jit
def weighted_sum(p, v, acc, INTERPRET: tl.constexpr):
    """acc + p @ v with p in FP32, on the tensor cores of v's dtype.

    p is split in two numbers of that dtype, which together hold twice its significand: rounding p
    to BF16 once would be the largest error of the whole kernel.
    """
    dtype: tl.constexpr = v.dtype
    high = round_to(p, dtype, INTERPRET)
    acc = dot(high, v, acc, INTERPRET)
    if dtype != tl.float32:
        low = round_to(p - high.to(tl.float32), dtype, INTERPRET)
        acc = dot(low, v, acc, INTERPRET)
    return acc


@triton.jit
def _scores(q, k, inside, scale, softcap, CAPPED: tl.constexpr, INTERPRET: tl.constexpr):
    """Scores in units of log 2, [ROWS, TILE] FP32; -inf where not `inside`."""
    zero = tl.zeros((q.shape[0], k.shape[0]), tl.float32)
    s = dot(q, tl.trans(k), zero, INTERPRET) * scale
    if CAPPED:
        s = softcap * tanh(s / softcap)
    return tl.where(inside[None, :], s * _LOG2_E, float("-inf"))


@triton.jit
def take_in(s, v, m, total, acc, INTERPRET: tl.constexpr):
    """(m, total, acc) with one more tile; of its positions at least one is inside, so that the
    maximum is not -inf."""
    m_next = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - m_next[:, None])
    shrink = tl.exp2(m - m_next)
    total = total * shrink + tl.sum(p, 1)
    return m_next, total, weighted_sum(p, v, acc * shrink[:, None], INTERPRET)


@triton.jit
def load_heads(
    pool, slot, head, inside, HEADS: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr
):
    """Rows [TILE, COLS] of one head at `slot`s (tokens of the whole pool), zero where not real."""
    c = tl.arange(0, COLS)
    at = (slot * HEADS + head)[:, None] * DIM + c[None, :]
    return tl.load(pool + at, mask=inside[:, None] & (c < DIM)[None, :], other=0)


@triton.jit
def _cached_heads(
    pool, exponents, slot, head, inside,
    HEADS: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr,
    FP8: tl.constexpr, DTYPE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """`load_heads` in the dtype that the model computes in, whatever it is kept in."""
    x = load_heads(pool, slot, head, inside, HEADS, DIM, COLS)
    if FP8:
        e = tl.load(exponents + slot * HEADS + head, mask=inside, other=127)
        x = decode_rows(x, e, DTYPE, INTERPRET)
    return x


@triton.jit
def slots_of(table, position, inside, num_blocks, BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Where positions of a row lie, as tokens of the whole pool, int64."""
    entry = position // BLOCK_TOKENS
    if WINDOW > 0:
        entry = entry % num_blocks
    block = tl.load(table + entry, mask=inside, other=0).to(tl.int64)
    return block * BLOCK_TOKENS + position % BLOCK_TOKENS


@triton.jit
def _partial_kernel(
    q_BQD, k_pool, v_pool, k_exponents, v_exponents, block_table_BN, lengths_B,
    acc_BQSD, stats_BQS2, q_row_stride, q_head_stride, num_blocks, scale, softcap,
    CAPPED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_COLS: tl.constexpr, VALUE_COLS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    FP8: tl.constexpr, INTERPRET: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = q_BQD.dtype.element_ty
    wait_for_previous(DEPENDENT)
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_B + row)
    first, first_tile, num_tiles, split_tiles = parts_of(length, WINDOW, TILE, SPLITS)
    begin = split * split_tiles
    end = tl.minimum(begin + split_tiles, num_tiles)
    if begin >= end:
        return

    r, c, d = tl.arange(0, ROWS), tl.arange(0, KEY_COLS), tl.arange(0, VALUE_COLS)
    head, real = kv_head * GROUP + r, r < GROUP
    q_at = row * q_row_stride + head[:, None] * q_head_stride + c[None, :]
    q = tl.load(q_BQD + q_at, mask=real[:, None] & (c < KEY_DIM)[None, :], other=0.0)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_COLS), tl.float32)
    table = block_table_BN + row * num_blocks
    for tile in range(first_tile + begin, first_tile + end):
        position = tile * TILE + tl.arange(0, TILE)
        inside = (position >= first) & (position < length)
        slot = slots_of(table, position, inside, num_blocks, BLOCK_TOKENS, WINDOW)
        k = _cached_heads(
            *(k_pool, k_exponents, slot, kv_head, inside),
            *(HEADS, KEY_DIM, KEY_COLS, FP8, dtype, INTERPRET),
        )
        v = _cached_heads(
            *(v_pool, v_exponents, slot, kv_head, inside),
            *(HEADS, VALUE_DIM, VALUE_COLS, FP8, dtype, INTERPRET),
        )
        s = _scores(q, k, inside, scale, softcap, CAPPED, INTERPRET)
        m, total, acc = take_in(s, v, m, total, acc, INTERPRET)

    # [B, Hq, splits of the grid]; unused splits stay unwritten and are never read.
    at = (row * (HEADS * GROUP) + head) * tl.num_programs(0) + split
    tl.store(stats_BQS2 + at * 2, m, mask=real)
    tl.store(stats_BQS2 + at * 2 + 1, total, mask=real)
    out = acc_BQSD + at[:, None] * VALUE_DIM + d[None, :]
    tl.store(out, acc, mask=real[:, None] & (d < VALUE_DIM)[None, :])


@triton.jit
def _reduce_kernel(
    acc_BQSD,
    stats_BQS2,
    lengths_B,
    sinks_Q,
    out_BQD,
    grid_splits,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    INTERPRET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    row, head = tl.program_id(2), tl.program_id(1)
    d = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row_head = row.to(tl.int64) * tl.num_programs(1) + head
    out = out_BQD + row_head * VALUE_DIM + d
    dtype: tl.constexpr = out_BQD.dtype.element_ty
    length = tl.load(lengths_B + row)
    if length <= 0:
        tl.store(out, tl.zeros((COLS,), dtype), mask=d < VALUE_DIM)
        return

    _first, _first_tile, num_tiles, split_tiles = parts_of(length, WINDOW, TILE, SPLITS)
    split = tl.arange(0, SPLITS)
    used = split * split_tiles < num_tiles
    at = row_head * grid_splits + split
    m = tl.load(stats_BQS2 + at * 2, mask=used, other=float("-inf"))
    total = tl.load(stats_BQS2 + at * 2 + 1, mask=used, other=0.0)
    top = tl.max(m, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_Q + head).to(tl.float32) * _LOG2_E
        top = tl.maximum(top, sink)
    weight = tl.exp2(m - top)
    denominator = tl.sum(weight * total, 0)
    if HAS_SINKS:
        denominator += tl.exp2(sink - top)
    real = used[:, None] & (d < VALUE_DIM)[None, :]
    acc = tl.load(acc_BQSD + at[:, None] * VALUE_DIM + d[None, :], mask=real, other=0.0)
    result = tl.sum(weight[:, None] * acc, 0) / denominator
    tl.store(out, round_to(result, dtype, INTERPRET), mask=d < VALUE_DIM)


def decode_attention(
    q_BQD: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_Q: torch.Tensor | None = None,
    exponents: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, Hq, Dv] in the dtype of `q_BQD`; see `attention.AttentionKernels.decode`.

    Args:
        q_BQD: any strides but the last.
        out: contiguous, to write to; made here otherwise.
    """
    batch, num_heads, key_dim = q_BQD.shape
    _, block_tokens, num_kv_heads, value_dim = v_pool.shape
    launch = launch_shape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        element_bytes=q_BQD.element_size(),
    )
    splits = most_splits(launch, block_table_BN.shape[1] * block_tokens, window)
    acc_BQSD = q_BQD.new_empty(batch, num_heads, splits, value_dim, dtype=torch.float32)
    stats_BQS2 = q_BQD.new_empty(batch, num_heads, splits, 2, dtype=torch.float32)
    out = q_BQD.new_empty(batch, num_heads, value_dim) if out is None else out
    _partial_kernel[(splits, num_kv_heads, batch)](
        q_BQD,
        *(k_pool, v_pool, *(exponents or (k_pool, v_pool)), block_table_BN, lengths_B),
        *(acc_BQSD, stats_BQS2),
        *q_BQD.stride()[:2],
        *(block_table_BN.shape[1], scale, softcap or 0.0),
        CAPPED=softcap is not None,
        FP8=exponents is not None,
        BLOCK_TOKENS=block_tokens,
        HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        WINDOW=window or 0,
        **_widths(launch, key_dim, value_dim),
        **dependent_launch(q_BQD.device),
    )
    sum_splits(acc_BQSD, stats_BQS2, lengths_B, out, launch=launch, window=window, sinks_Q=sinks_Q)
    return out


def sum_splits(
    acc_BQSD: torch.Tensor,
    stats_BQS2: torch.Tensor,
    lengths_B: torch.Tensor,
    out: torch.Tensor,
    *,
    launch: Launch,
    window: int | None = None,
    sinks_Q: torch.Tensor | None = None,
) -> None:
    """Adds up what partial kernels left of each row, into `out` [B, Hq, Dv], contiguous.

    Args:
        acc_BQSD: FP32, sums of weighted values of each split of the grid.
        stats_BQS2: FP32, maximum in units of log 2, and sum of weights.
        launch, window: as of the partial kernel, which cut the rows.
    """
    batch, num_heads, splits, value_dim = acc_BQSD.shape
    _reduce_kernel[(triton.cdiv(value_dim, launch.reduce_columns), num_heads, batch)](
        *(acc_BQSD, stats_BQS2, lengths_B, sinks_Q, out, splits),
        HAS_SINKS=sinks_Q is not None,
        WINDOW=window or 0,
        VALUE_DIM=value_dim,
        COLS=launch.reduce_columns,
        TILE=launch.tile,
        SPLITS=launch.splits,
        INTERPRET=is_interpreted(_reduce_kernel),
        num_warps=4,
        **dependent_launch(out.device),
    )


def _widths(launch: Launch, key_dim: int, value_dim: int) -> dict[str, int]:
    return {
        "ROWS": launch.rows,
        "KEY_DIM": key_dim,
        "KEY_COLS": _columns(key_dim),
        "VALUE_COLS": _columns(value_dim),
        "VALUE_DIM": value_dim,
        "TILE": launch.tile,
        "SPLITS": launch.splits,
        "INTERPRET": is_interpreted(_partial_kernel),
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }
