"""Products of a few tokens with several matrices, against FP64, for awkward shapes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hotset.kernels.products import (
    MAX_COLUMNS,
    MAX_TOKENS,
    accepts,
    launch_products,
    products,
    products_reference,
    rows_of_program,
)
from hotset.kernels.products_dot import launch_dot_products, pays
from kernels.support import DEVICE, EPS32

BF16 = torch.bfloat16
# (tokens, columns, rows of each matrix): whole tiles, and rows, columns and matrices that are not.
SHAPES = [(1, 64, (16, 8, 8)), (3, 40, (5,)), (8, 128, (6, 2)), (2, 72, (3, 7, 1, 9))]


def make(
    shape: tuple[int, int, tuple[int, ...]], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    num_tokens, columns, sizes = shape
    source = torch.Generator().manual_seed(columns)
    x_TC, *weights = (
        torch.randn(n, columns, generator=source).to(dtype).to(DEVICE) for n in (num_tokens, *sizes)
    )
    biases = [torch.randn(n, generator=source).to(dtype).to(DEVICE) for n in sizes]
    return x_TC, weights, biases


def excess(
    got: Sequence[torch.Tensor],
    x_TC: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> float:
    """Largest |error| / bound: C products, sums and a bias in FP32, then half a unit of the last
    place."""
    worst = 0.0
    for index, (y_TN, w_NC) in enumerate(zip(got, weights, strict=True)):
        exact, size = x_TC.double() @ w_NC.double().T, x_TC.double().abs() @ w_NC.double().abs().T
        if biases:
            exact, size = exact + biases[index].double(), size + biases[index].double().abs()
        bound = EPS32 * (x_TC.shape[1] + 1) * size + torch.finfo(x_TC.dtype).eps / 2 * exact.abs()
        worst = max(worst, ((y_TN.double() - exact).abs() / bound).max().item())
    return worst


@pytest.mark.parametrize("launch", [launch_products, products_reference])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_within_the_derived_bound(
    launch: object, dtype: torch.dtype, shape: tuple[int, int, tuple[int, ...]]
) -> None:
    assert callable(launch)
    x_TC, weights, biases = make(shape, dtype)
    for given in ([], biases):
        got = launch(x_TC, weights, given)
        assert [tuple(y.shape) for y in got] == [(len(x_TC), len(w)) for w in weights]
        assert excess(got, x_TC, weights, given) <= 1
    # Control: a bias that is left out is seen.
    assert excess(launch(x_TC, weights, []), x_TC, weights, biases) > 1


def test_a_column_left_out_is_seen() -> None:
    x_TC, weights, _ = make(SHAPES[0], BF16)
    less = x_TC.clone()
    less[:, -1] = 0
    assert excess(launch_products(less, weights, []), x_TC, weights, []) > 1


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    x_TC, weights, biases = make((MAX_TOKENS, 72, (3, 6)), dtype)
    together = launch_products(x_TC, weights, biases)
    for token in range(MAX_TOKENS):
        alone = launch_products(x_TC[token : token + 1].contiguous(), weights, biases)
        for all_TN, one_1N in zip(together, alone, strict=True):
            assert torch.equal(all_TN[token : token + 1], one_1N)


def test_a_matrix_has_the_same_bits_alone_and_among_others() -> None:
    x_TC, weights, _ = make((2, 64, (16, 8, 8)), BF16)
    together = launch_products(x_TC, weights, [], rows=2)
    for y_TN, w_NC in zip(together, weights, strict=True):
        assert torch.equal(launch_products(x_TC, [w_NC], [], rows=2)[0], y_TN)


# (tokens, columns, rows of each matrix): whole tiles; rows, columns and tokens that are not.
DOT_SHAPES = [(8, 256, (16, 32)), (4, 264, (5, 17)), (5, 40, (3,)), (7, 512, (16, 1, 9, 2))]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("shape", DOT_SHAPES)
def test_on_tensor_cores_within_the_derived_bound(
    dtype: torch.dtype, shape: tuple[int, int, tuple[int, ...]]
) -> None:
    x_TC, weights, biases = make(shape, dtype)
    for given in ([], biases):
        got = launch_dot_products(x_TC, weights, given)
        assert [tuple(y.shape) for y in got] == [(len(x_TC), len(w)) for w in weights]
        assert excess(got, x_TC, weights, given) <= 1
    # Controls: a bias, or a column, that is left out is seen.
    assert excess(launch_dot_products(x_TC, weights, []), x_TC, weights, biases) > 1
    less = x_TC.clone()
    less[:, -1] = 0
    assert excess(launch_dot_products(less, weights, []), x_TC, weights, []) > 1


def test_on_tensor_cores_a_token_has_the_same_bits_among_others() -> None:
    x_TC, weights, biases = make((8, 264, (16, 5)), BF16)
    together = launch_dot_products(x_TC, weights, biases)
    for tokens in ([0, 1, 2, 3], [7, 2, 5, 0, 6]):
        fewer = launch_dot_products(x_TC[tokens].contiguous(), weights, biases)
        for all_TN, some_TN in zip(together, fewer, strict=True):
            assert torch.equal(all_TN[tokens], some_TN)


def test_shapes_alone_choose_the_kernel() -> None:
    assert pays(8, [4096, 512, 512], BF16) and pays(4, [2048], torch.float16)
    assert not pays(2, [4096, 512, 512], BF16)  # rows held in registers are as fast
    assert not pays(8, [128], BF16)  # a router: too few programs
    assert not pays(8, [2048], torch.float32)  # no tensor core multiplies it
    x_TC, weights, biases = make((4, 40, (1024,)), BF16)
    chosen, held = (launch_products(x_TC, weights, biases, rows=n)[0] for n in (None, 2))
    assert torch.equal(chosen, launch_dot_products(x_TC, weights, biases)[0])
    assert chosen.shape == held.shape


def test_programs_hold_whole_rows_and_fill_a_card() -> None:
    assert rows_of_program(2048, 5120, 2) == 4
    assert rows_of_program(4096, 2048, 2) == 2
    assert rows_of_program(2048, 128, 2) == 1  # a router: one row each, for what it is
    assert rows_of_program(MAX_COLUMNS, 4096, 4) == 1


def test_what_is_taken() -> None:
    assert accepts(MAX_TOKENS, 2048, BF16)
    assert not accepts(MAX_TOKENS + 1, 2048, BF16)
    assert not accepts(1, 2 * MAX_COLUMNS, BF16)
    assert not accepts(1, 2044, BF16)  # a row of it would not begin at 16 bytes
    assert not accepts(1, 2048, torch.int8)


def test_the_operator() -> None:
    x_TC, weights, biases = make(SHAPES[0], BF16)
    torch.library.opcheck(products, (x_TC, weights, biases))
    want = launch_products if x_TC.is_cuda else products_reference
    for left, right in zip(
        products(x_TC, weights, biases), want(x_TC, weights, biases), strict=True
    ):
        assert torch.equal(left, right)
