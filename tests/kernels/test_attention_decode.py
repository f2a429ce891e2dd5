"""Decode attention against FP64, both implementations, awkward shapes; and what its bits are of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotset.kernels import attention_decode
from hotset.kernels.attention import AttentionKernels
from hotset.kernels.attention_decode import Launch, launch_shape, most_splits
from kernels.attention_support import Rows, Shape, decode, lay_out, make_rows, oracle

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REFERENCE, TRITON = AttentionKernels("reference"), AttentionKernels("triton")
BOTH = pytest.mark.parametrize("kernels", [TRITON, REFERENCE], ids=lambda k: k.name)

SHAPES = {
    "fp32": Shape(),
    "bf16": Shape(dtype=BF16, key_dim=64, value_dim=64),
    "fp16": Shape(dtype=FP16, key_dim=64, value_dim=64),
    "one token": Shape(lengths=(1,), dtype=BF16),
    "values narrower than keys": Shape((40,), 4, 2, key_dim=192, value_dim=128, dtype=BF16),
    "values wider than keys": Shape((19,), 2, 1, key_dim=16, value_dim=40),
    "group 1": Shape((21,), 3, 3, key_dim=80, value_dim=80, dtype=FP16),
    "group 3": Shape((21, 5), 6, 2, key_dim=96, value_dim=96, dtype=BF16),
    "group 32": Shape((21,), 32, 1, dtype=BF16),
    "head dim 256": Shape((37,), 4, 2, key_dim=256, value_dim=256, dtype=BF16),
    "head dim 512": Shape((18,), 2, 1, key_dim=512, value_dim=512, dtype=BF16, scale=0.05),
    "tiny heads": Shape((21,), 4, 2, key_dim=8, value_dim=8),
    "softcap": Shape(lengths=(40,), softcap=1.5, scale=1.0),
    "sinks": Shape(lengths=(40, 1, 0), sinks=True, dtype=BF16),
    "window": Shape(lengths=(40, 7, 0), window=12, dtype=BF16),
    "all at once": Shape(lengths=(40, 3), window=9, softcap=1.5, sinks=True, scale=1.0),
}


@BOTH
@pytest.mark.parametrize("name", SHAPES)
def test_within_the_derived_bound(kernels: AttentionKernels, name: str) -> None:
    rows = make_rows(SHAPES[name])
    out = decode(kernels, rows, lay_out(rows))
    assert out.dtype == rows.shape.dtype and out.is_contiguous()
    oracle(rows).check(out)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 and at most 4 splits, so that short rows have several tiles in a split."""

    def launch(**shape: int) -> Launch:
        return replace(launch_shape(**shape), tile=16, splits=4)

    monkeypatch.setattr(attention_decode, "launch_shape", launch)


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("window", [None, 90])
def test_several_tiles_in_a_split(window: int | None) -> None:
    """0, 1, 4, 5 and 9 tiles: no split, one, all with one tile, some with two, some with three."""
    shape = Shape((0, 16, 64, 65, 130), 4, 1, window=window, dtype=BF16, sinks=True)
    rows = make_rows(shape)
    oracle(rows).check(decode(TRITON, rows, lay_out(rows)))


@BOTH
def test_a_ring_turns_at_any_place(kernels: AttentionKernels) -> None:
    """Lengths around the window, the block and the ring (3 blocks of 8) and their multiples."""
    shape = Shape((15, 16, 17, 23, 24, 25, 47, 48, 49), 2, 1, window=16, block_tokens=8)
    rows = make_rows(shape)
    assert shape.row_blocks == 3
    oracle(rows).check(decode(kernels, rows, lay_out(rows)))


@BOTH
@pytest.mark.parametrize("window", [None, 20])
def test_bits_are_of_the_row_alone(kernels: AttentionKernels, window: int | None) -> None:
    rows = make_rows(Shape((70, 0, 33), 4, 2, dtype=BF16, window=window, sinks=True))
    expected = decode(kernels, rows, lay_out(rows))
    elsewhere = decode(kernels, rows, lay_out(rows, seed=1))
    assert torch.equal(elsewhere, expected)
    for other in (rows.with_shape(spare_blocks=7), rows.with_shape(block_tokens=8)):
        assert torch.equal(decode(kernels, other, lay_out(other)), expected)
    for row in range(3):
        alone = rows.only(row)
        if alone.shape.lengths[0]:
            assert torch.equal(decode(kernels, alone, lay_out(alone)), expected[row : row + 1])
    # Control: another query changes them.
    rows.q_BQD[0] += 0.5
    assert not torch.equal(decode(kernels, rows, lay_out(rows)), expected)


@BOTH
def test_padding_is_zero_whatever_lies_in_its_blocks(kernels: AttentionKernels) -> None:
    rows = make_rows(Shape((0, 20, 0), 4, 2, sinks=True))
    laid = lay_out(rows)
    laid.block_table_BN[0] = 2**30  # would be far outside the pool
    out = decode(kernels, rows, laid)
    assert (out[0] == 0).all() and (out[2] == 0).all() and out[1].isfinite().all()


@BOTH
def test_queries_may_be_strided(kernels: AttentionKernels) -> None:
    rows = make_rows(Shape((20, 9), 4, 2))
    laid = lay_out(rows)
    expected = decode(kernels, rows, laid)
    rows.q_BQD = rows.q_BQD.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(decode(kernels, rows, laid), expected)
    rows.q_BQD = rows.q_BQD.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(decode(kernels, rows, laid), expected)


def _newest_missing(rows: Rows) -> Rows:
    return rows.with_shape(lengths=tuple(length - 1 for length in rows.shape.lengths))


def _heads_in_turn(rows: Rows) -> Rows:
    """As if query head h belonged to KV head h % Hkv."""
    return replace(rows, k_BPHD=rows.k_BPHD.flip(2), v_BPHD=rows.v_BPHD.flip(2))


def _scores_slightly_off(rows: Rows) -> Rows:
    return rows.with_shape(scale=rows.shape.scale * (1 + 2.0**-10))


@pytest.mark.parametrize(
    "mistake",
    [
        _newest_missing,
        _heads_in_turn,
        _scores_slightly_off,
        lambda rows: rows.with_shape(window=rows.shape.window + 1),
        lambda rows: rows.with_shape(window=rows.shape.window - 1),
        lambda rows: rows.with_shape(softcap=None),
        lambda rows: replace(rows, sinks_Q=None),
        lambda rows: replace(rows, sinks_Q=rows.sinks_Q.flip(0)),
    ],
)
def test_control_mistakes_are_caught(mistake) -> None:  # type: ignore[no-untyped-def]
    rows = make_rows(Shape((40, 13), 4, 2, window=9, softcap=2.5, sinks=True, scale=1.0))
    exact = oracle(rows)
    wrong = mistake(rows)
    assert exact.excess(decode(REFERENCE, rows, lay_out(rows))) <= 1
    assert exact.excess(decode(REFERENCE, wrong, lay_out(wrong))) > 20


def test_control_weights_rounded_to_bf16_are_caught() -> None:
    """What the second number of each weight is for: values that nearly cancel show it."""
    shape = Shape((64,), 1, 1, key_dim=16, value_dim=16, dtype=BF16)
    rows = make_rows(shape)
    rows.v_BPHD[:, 1::2] = -rows.v_BPHD[:, ::2]
    rows.k_BPHD[:, 1::2] = rows.k_BPHD[:, ::2]
    rows.k_BPHD[:, 1::2, :, 0] *= 1 + 2.0**-7  # so that weights of a pair differ, a little
    exact = oracle(rows)
    exact.check(decode(TRITON, rows, lay_out(rows)))
    s = shape.scale * (rows.k_BPHD[0, :, 0].float() @ rows.q_BQD[0, 0].float())
    w = torch.exp(s - s.max())
    once = (w.to(BF16).float() @ rows.v_BPHD[0, :, 0].float() / w.sum()).to(BF16)
    assert exact.excess(once[None, None]) > 1


def test_the_grid_covers_every_window() -> None:
    """The splits that the grid has room for, against counting tiles for every place of a window."""
    launch = Launch(tile=16, splits=64, rows=16, reduce_columns=16)
    for window in range(1, 70):
        tiles = max(
            (length - 1) // 16 - max(0, length - window) // 16 + 1 for length in range(1, 200)
        )
        assert tiles <= most_splits(launch, 10**6, window) <= tiles + 1
