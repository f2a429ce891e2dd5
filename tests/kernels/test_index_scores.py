"""Scores of indexers: the specification and the Triton kernel within a derived bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hotset.kernels.attention import AttentionKernels
from kernels.index_support import Index, make_index, oracle, seen

BF16, FP16 = torch.bfloat16, torch.float16
REFERENCE, TRITON = AttentionKernels("reference"), AttentionKernels("triton")
BOTH = pytest.mark.parametrize("kernels", [TRITON, REFERENCE], ids=lambda k: k.name)

CASES = {
    "DeepSeek": make_index((70, 3), 64, 128, dtype=BF16, block_keys=32),
    "pools, two keys a block": make_index((37, 0, 128), 32, 128, dtype=BF16, block_keys=2),
    "one text": make_index((9, 10, 70), 16, 64, dtype=FP16, shared=True),
    "fp32, widths that are padded": make_index((5, 66), 3, 24),
}


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_within_the_derived_bound(kernels: AttentionKernels, name: str) -> None:
    index = CASES[name]
    scores_NP = kernels.index_scores(*index.arguments)
    assert scores_NP.dtype == torch.float32
    oracle(index).check(seen(index, scores_NP))


def _no_relu(index: Index) -> Index:
    """As if negative products counted: of -k the others would."""
    return replace(index, pool=-index.pool)


def _another_weight(index: Index) -> Index:
    return replace(index, weights_NH=index.weights_NH.roll(1, dims=1).contiguous())


def _another_block(index: Index) -> Index:
    return replace(index, table_RN=index.table_RN.roll(1, dims=1).contiguous())


@BOTH
@pytest.mark.parametrize("mistake", [_no_relu, _another_weight, _another_block])
def test_control_mistakes_are_caught(
    kernels: AttentionKernels, mistake: Callable[[Index], Index]
) -> None:
    index = make_index((16, 16), 3, 16, spare_blocks=0)
    scores_NP = kernels.index_scores(*mistake(index).arguments)
    assert oracle(index).excess(seen(index, scores_NP)) > 20


@BOTH
def test_bits_are_of_query_and_candidate_alone(kernels: AttentionKernels) -> None:
    index = make_index((70, 33), 4, 16, dtype=BF16)
    expected = kernels.index_scores(*index.arguments)
    wider = replace(index, table_RN=torch.cat((index.table_RN, index.table_RN), 1))
    both = kernels.index_scores(*wider.arguments)[:, : expected.shape[1]]
    assert torch.equal(both, expected)
    for row, count in enumerate((70, 33)):
        one = slice(row, row + 1)
        alone = replace(
            index,
            q_NHD=index.q_NHD[one],
            weights_NH=index.weights_NH[one],
            table_RN=index.table_RN[one],
            counts_N=index.counts_N[one],
        )
        assert torch.equal(kernels.index_scores(*alone.arguments)[0, :count], expected[row, :count])
    index.q_NHD[0] += 0.5  # control
    assert not torch.equal(kernels.index_scores(*index.arguments), expected)
