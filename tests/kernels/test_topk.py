"""Top-k of short rows against a stable sort: order, equals, what is no number; and of a softmax."""

from __future__ import annotations

import pytest
import torch

from hotset.kernels.topk import (
    MAX_COLUMNS,
    MAX_K,
    accepts,
    launch_topk,
    softmax_topk,
    softmax_topk_reference,
    topk,
    topk_reference,
)
from kernels.support import DEVICE, EPS32

SHAPES = pytest.mark.parametrize(
    ("num_columns", "k"), [(128, 8), (60, 4), (7, 7), (1, 1), (512, 10)]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def rows(num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of 1/16: many equals, and whoever differs differs by 6% after a softmax."""
    source = torch.Generator().manual_seed(num_columns)
    x = torch.randn(5, num_columns, generator=source) * 3
    return ((x * 16).round() / 16).to(dtype).to(DEVICE)


@SHAPES
@DTYPES
def test_as_a_stable_sort(num_columns: int, k: int, dtype: torch.dtype) -> None:
    x = rows(num_columns, dtype)
    x[1] = x[1].round()
    x[2, : num_columns // 2] = float("-inf")
    x[3, ::2] = -0.0
    x[3, 1::2] = 0.0
    values, ids = launch_topk(x, k)
    want_values, want_ids = topk_reference(x, k)
    assert torch.equal(ids, want_ids) and torch.equal(values, want_values)
    # Control: there are equals, and not the lowest index first among them is seen.
    if num_columns > 60:
        backwards = num_columns - 1 - topk_reference(x.flip(-1), k)[1]
        assert not torch.equal(ids, backwards)


def test_what_is_no_number_comes_last() -> None:
    x = torch.tensor([[float("nan"), 1.0, float("-inf"), float("nan")]], device=DEVICE)
    values, ids = launch_topk(x, 4)
    assert ids.tolist() == [[1, 2, 0, 3]]
    assert values[0, 2:].isnan().all() and values[0, :2].tolist() == [1.0, float("-inf")]
    # A row of nothing else still names k different columns.
    assert launch_topk(torch.full_like(x, float("nan")), 3, softmax=True)[1].tolist() == [[0, 1, 2]]


@SHAPES
@DTYPES
@pytest.mark.parametrize("normalise", [False, True])
def test_softmax_topk(num_columns: int, k: int, dtype: torch.dtype, normalise: bool) -> None:
    x = rows(num_columns, dtype)
    values, ids = launch_topk(x, k, softmax=True, normalise=normalise, dtype=dtype)
    _, want_ids = softmax_topk_reference(x, k, normalise=normalise, dtype=dtype)
    assert torch.equal(ids, want_ids) and values.dtype == dtype
    exact = torch.softmax(x.double(), -1).gather(-1, want_ids)
    if normalise:
        exact = exact / exact.sum(-1, keepdim=True)
    # Differences of up to 32 have an error of 2^-19 in an FP32 exponent; the sum has one for each
    # column; then half a unit of the last place.
    bound = 2.0**-18 + EPS32 * (num_columns + k + 8) + torch.finfo(dtype).eps / 2
    # Below the normal numbers of a dtype its spacing is an absolute one.
    spacing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    error = (values.double() - exact).abs()
    assert (error <= bound * exact + spacing).all()
    # Control: what the other form would have given is seen, where it is another one.
    if 1 < k < num_columns:
        other = launch_topk(x, k, softmax=True, normalise=not normalise, dtype=dtype)[0]
        assert ((other.double() - exact).abs() > bound * exact + spacing).any()


def test_what_is_taken() -> None:
    assert accepts(MAX_COLUMNS, MAX_K, torch.bfloat16)
    assert not accepts(MAX_COLUMNS + 1, 8, torch.bfloat16)
    assert not accepts(128, MAX_K + 1, torch.bfloat16) and not accepts(4, 5, torch.bfloat16)
    assert not accepts(128, 8, torch.int32) and not accepts(128, 8, torch.float64)


def test_the_operators() -> None:
    x = rows(60, torch.bfloat16)
    torch.library.opcheck(topk, (x, 4))
    torch.library.opcheck(softmax_topk, (x, 4, True, torch.bfloat16))
