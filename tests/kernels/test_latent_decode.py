"""Decode attention in latent space against FP64, both implementations, awkward shapes; its bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotset.kernels import latent_decode
from hotset.kernels.attention import AttentionKernels
from hotset.kernels.attention_decode import Launch
from hotset.kernels.latent_decode import launch_shape
from kernels.attention_support import lay_out, oracle
from kernels.latent_support import decode_latents, latent_rows, latent_shape

BF16, FP16 = torch.bfloat16, torch.float16
REFERENCE, TRITON = AttentionKernels("reference"), AttentionKernels("triton")
BOTH = pytest.mark.parametrize("kernels", [TRITON, REFERENCE], ids=lambda k: k.name)


SHAPES = {
    "DeepSeek": latent_shape((37,), 3, 512, 64, BF16),
    "more heads than a program has": latent_shape((19,), 33, 512, 64, BF16),
    "Mistral 4": latent_shape((21,), 32, 256, 64, FP16),
    "fp32": latent_shape((70, 0, 33), 4, 16, 8),
    "fp32, heads cut": latent_shape((9,), 19, 48, 24),
    "sinks": latent_shape((20, 0, 3), 5, 32, 16, BF16, sinks=True),
    "no rotary part": latent_shape((21, 3), 4, 32, 0, BF16),
    "widths that are padded": latent_shape((18, 5), 5, 80, 24, BF16, block_tokens=8),
}


@BOTH
@pytest.mark.parametrize("name", SHAPES)
def test_within_the_derived_bound(kernels: AttentionKernels, name: str) -> None:
    rows = latent_rows(SHAPES[name])
    out = decode_latents(kernels, rows, lay_out(rows))
    assert out.dtype == rows.shape.dtype and out.is_contiguous()
    oracle(rows).check(out)


def test_rows_that_are_not_cut() -> None:
    """As tokens of a prompt are: many rows, a whole context each."""
    rows = latent_rows(latent_shape((70, 0, 33), 4, 48, 24, BF16))
    oracle(rows).check(decode_latents(TRITON, rows, lay_out(rows), many=True))


@pytest.mark.parametrize("kernels", [TRITON, REFERENCE], ids=lambda k: k.name)
def test_control_mistakes_are_caught(kernels: AttentionKernels) -> None:
    """No rotary part, the newest position left out, scores slightly off."""
    rows = latent_rows(latent_shape((40, 13), 4, 16, 8))
    exact, rank = oracle(rows), rows.shape.value_dim
    without = replace(rows, k_BPHD=rows.k_BPHD.clone())
    without.k_BPHD[..., rank:] = 0
    fewer = tuple(length - 1 for length in rows.shape.lengths)
    wrong = (
        without,
        rows.with_shape(lengths=fewer),
        rows.with_shape(scale=rows.shape.scale * 1.01),
    )
    for mistake in wrong:
        assert exact.excess(decode_latents(kernels, mistake, lay_out(mistake))) > 20


def test_several_tiles_in_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """0, 1, 4, 5 and 9 tiles in at most 4 splits: none, one, all with one, some with two, three."""

    def launch(**shape: int) -> Launch:
        return replace(launch_shape(**shape), tile=16, splits=4)

    monkeypatch.setattr(latent_decode, "launch_shape", launch)
    rows = latent_rows(latent_shape((0, 16, 64, 65, 130), 3, 32, 16, BF16))
    oracle(rows).check(decode_latents(TRITON, rows, lay_out(rows)))


@BOTH
def test_bits_are_of_the_row_alone(kernels: AttentionKernels) -> None:
    rows = latent_rows(latent_shape((70, 0, 33), 4, 32, 16, BF16))
    expected = decode_latents(kernels, rows, lay_out(rows))
    for other in (rows, rows.with_shape(spare_blocks=7), rows.with_shape(block_tokens=8)):
        assert torch.equal(decode_latents(kernels, other, lay_out(other, seed=1)), expected)
    for row, length in enumerate(rows.shape.lengths):
        if length:
            alone = rows.only(row)
            assert torch.equal(
                decode_latents(kernels, alone, lay_out(alone)), expected[row : row + 1]
            )
    rows.q_BQD[0] += 0.5  # control
    assert not torch.equal(decode_latents(kernels, rows, lay_out(rows)), expected)


@BOTH
def test_padding_is_zero_whatever_lies_in_its_blocks(kernels: AttentionKernels) -> None:
    rows = latent_rows(latent_shape((0, 20, 0), 4, 16, 8))
    laid = lay_out(rows)
    laid.block_table_BN[0] = 2**30  # would be far outside the pool
    out = decode_latents(kernels, rows, laid)
    assert (out[0] == 0).all() and (out[2] == 0).all() and out[1].isfinite().all()


def test_queries_may_be_strided() -> None:
    """As they come from a batched product: heads outermost."""
    rows = latent_rows(latent_shape((20, 9), 4, 16, 8))
    laid = lay_out(rows)
    expected = decode_latents(TRITON, rows, laid)
    rows.q_BQD = rows.q_BQD.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(decode_latents(TRITON, rows, laid), expected)
