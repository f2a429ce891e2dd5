"""The weighted sum over k against FP64, for every dtype and awkward shapes."""

from __future__ import annotations

import pytest
import torch

from hotset.kernels.dispatch import Kernels, ReferenceKernels, TritonKernels
from kernels.support import DEVICE, EPS32

BOTH = pytest.mark.parametrize(
    "kernels", [TritonKernels(), ReferenceKernels()], ids=lambda k: k.name
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def make(num_tokens: int, top_k: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(num_tokens)
    y_TKH = torch.randn(num_tokens, top_k, hidden, generator=source)
    weights_TK = torch.rand(num_tokens, top_k, generator=source)
    return y_TKH.to(DEVICE), weights_TK.to(DEVICE)


def excess(
    got_TH: torch.Tensor, y_TKH: torch.Tensor, weights_TK: torch.Tensor, dtype: torch.dtype
) -> float:
    """Largest |error| / bound: K products and sums in FP32, then half a unit of the last place."""
    terms = weights_TK.double()[..., None] * y_TKH.double()
    exact, size = terms.sum(1), terms.abs().sum(1)
    half_unit = torch.finfo(dtype).eps / 2
    bound = EPS32 * y_TKH.shape[1] * size + half_unit * exact.abs()
    return ((got_TH.double() - exact).abs() / bound).max().item()


@BOTH
@DTYPES
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden"), [(1, 8, 2048), (1, 1, 1), (13, 3, 517), (40, 2, 37)]
)
def test_combine(
    kernels: Kernels, num_tokens: int, top_k: int, hidden: int, dtype: torch.dtype
) -> None:
    y_TKH, weights_TK = make(num_tokens, top_k, hidden)
    out_TH = kernels.combine(y_TKH, weights_TK, dtype)
    assert out_TH.shape == (num_tokens, hidden) and out_TH.dtype == dtype
    assert excess(out_TH, y_TKH, weights_TK, dtype) <= 1


@BOTH
@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float16])
def test_weights_in_the_models_dtype(kernels: Kernels, weights_dtype: torch.dtype) -> None:
    y_TKH, weights_TK = make(5, 4, 37)
    weights_TK = weights_TK.to(weights_dtype)
    out_TH = kernels.combine(y_TKH, weights_TK, torch.float32)
    assert excess(out_TH, y_TKH, weights_TK, torch.float32) <= 1


@BOTH
@DTYPES
def test_control_mistakes_are_caught(kernels: Kernels, dtype: torch.dtype) -> None:
    y_TKH, weights_TK = make(13, 3, 517)
    out_TH = kernels.combine(y_TKH, weights_TK.roll(1, dims=1), dtype)
    assert excess(out_TH, y_TKH, weights_TK, dtype) > 100
    rounded = y_TKH.to(dtype if dtype != torch.float32 else torch.float16)
    out_TH = kernels.combine(rounded.float(), weights_TK, dtype)  # y must stay FP32
    assert excess(out_TH, y_TKH, weights_TK, dtype) > 1.2


@BOTH
def test_padding_contributes_nothing(kernels: Kernels) -> None:
    y_TKH, weights_TK = make(4, 3, 37)
    y_TKH[:, 1] = 0.0
    got = kernels.combine(y_TKH, weights_TK, torch.bfloat16)
    keep = [0, 2]
    want = kernels.combine(
        y_TKH[:, keep].contiguous(), weights_TK[:, keep].contiguous(), torch.bfloat16
    )
    assert torch.equal(got, want)
