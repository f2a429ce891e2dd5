"""The interpreter's two silent errors, and that the kernels' code steers around them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from hotset.kernels.device import dot_rows, is_interpreted, round_to, tanh
from kernels.support import DEVICE, EPS32

INTERPRETED = is_interpreted(round_to)
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@triton.jit
def _dot_kernel(x, w, out, SIZE: tl.constexpr, INTERPRET: tl.constexpr):
    r, c = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    acc = tl.zeros((SIZE, SIZE), tl.float32)
    acc = dot_rows(tl.load(x + r * SIZE + c), tl.load(w + r * SIZE + c), acc, INTERPRET)
    tl.store(out + r * SIZE + c, acc)


@triton.jit
def _round_kernel(x, out, SIZE: tl.constexpr, INTERPRET: tl.constexpr):
    n = tl.arange(0, SIZE)
    tl.store(out + n, round_to(tl.load(x + n), out.dtype.element_ty, INTERPRET))


@triton.jit
def _tanh_kernel(x, out, SIZE: tl.constexpr):
    n = tl.arange(0, SIZE)
    tl.store(out + n, tanh(tl.load(x + n)))


def dot(dtype: torch.dtype, interpret: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, |error| / bound) of a 16 x 16 product; an FP32 sum of 16 exact products."""
    x, w = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    out = torch.empty(16, 16, device=DEVICE)
    _dot_kernel[(1,)](x, w, out, SIZE=16, INTERPRET=interpret)
    exact, size = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    return out, ((out.double() - exact).abs() / (16 * EPS32 * size)).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dot(dtype: torch.dtype) -> None:
    assert dot(dtype, INTERPRETED)[1] <= 1


@only_interpreted
def test_control_bf16_without_the_cast_is_wrong() -> None:
    """When this fails the interpreter was mended, and `dot_rows` can lose its cast."""
    assert dot(torch.bfloat16, False)[1] > 1000


def around_halves(dtype: torch.dtype) -> torch.Tensor:
    """FP32 numbers at, just below and just above the middle of two neighbours in `dtype`."""
    low = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    step = low.float().abs() * torch.finfo(dtype).eps
    middle = (low.float() + (low.float() + step).to(dtype).float()) / 2
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, 3.0e38])
    upper, lower = middle.nextafter(middle * 2), middle.nextafter(middle * 0)
    values = torch.cat([middle, upper, lower, low.float(), special])
    return torch.cat([values, torch.zeros(2048 - len(values))])


def rounded(dtype: torch.dtype, interpret: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = around_halves(dtype).to(DEVICE)
    out = torch.empty(2048, dtype=dtype, device=DEVICE)
    _round_kernel[(1,)](x, out, SIZE=2048, INTERPRET=interpret)
    return out, x.to(dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # 3e38 in FP16 is infinite
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even(dtype: torch.dtype) -> None:
    got, expected = rounded(dtype, INTERPRETED)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@only_interpreted
def test_control_bf16_without_our_rounding_is_wrong() -> None:
    got, expected = rounded(torch.bfloat16, False)
    assert (got.nan_to_num() != expected.nan_to_num()).sum() > 100


def test_tanh_is_right_to_a_few_units_everywhere() -> None:
    x = torch.cat([torch.linspace(-12, 12, 2000), torch.logspace(-30, 0, 46), -torch.ones(2)])
    x = x.to(DEVICE)
    out = torch.empty_like(x)
    _tanh_kernel[(1,)](x, out, SIZE=2048)
    exact = torch.tanh(x.double())
    # Polynomial and exp each err by up to about 2 units of the last place, relative to tanh.
    assert ((out.double() - exact).abs() / (4 * EPS32 * exact.abs())).nan_to_num().max() <= 1
