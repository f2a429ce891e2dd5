"""The weighted sum over k against FP64, for every dtype and awkward shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hotset.kernels import reference
from hotset.kernels.dispatch import Kernels, ReferenceKernels, TritonKernels
from hotset.kernels.moe_prompt import accumulate
from hotset.kernels.ranges import group_ranges
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


def sorted_ids(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Distinct ids of each token in ascending order; the first token is padding."""
    source = torch.Generator().manual_seed(1)
    ids_TK = torch.rand(num_tokens, num_experts, generator=source).argsort(dim=1)[:, :top_k]
    ids_TK[0] = num_experts
    return ids_TK.sort(dim=1).values.to(DEVICE)


def room(y_TKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums that begin with what must not be read, and outputs of tokens without an expert."""
    shape = (len(y_TKH), y_TKH.shape[2])
    return torch.full(shape, torch.nan, device=DEVICE), torch.zeros(shape, device=DEVICE)


def reference_sum(edges: list[int], y_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """The sum over ranges of experts that end at `edges`; other rows of `y` are NaN meanwhile."""
    ids_TK = sorted_ids(*weights_TK.shape, edges[-1])
    sum_TH, out_TH = room(y_TKH)
    for first, stop in zip([0, *edges[:-1]], edges, strict=True):
        inside = ((ids_TK >= first) & (ids_TK < stop))[..., None]
        y = torch.where(inside, y_TKH, torch.nan)
        sums = {"num_experts": edges[-1], "sum_TH": sum_TH, "out_TH": out_TH}
        reference.accumulate(y, ids_TK, weights_TK, first=first, stop=stop, **sums)
    return out_TH


def triton_sum(
    edges: list[int], y_TKH: torch.Tensor, weights_TK: torch.Tensor, *, most_rows: int = 8
) -> torch.Tensor:
    """The same, in windows of blocks of 4 pairs: rows of `y` lie by place, others are NaN."""
    ids_TK = sorted_ids(*weights_TK.shape, edges[-1])
    ranges = group_ranges(ids_TK, edges[-1], block_tokens=4, most_rows=most_rows)
    order_N = ranges.grouping.order_N.long()
    starts, first_block = ranges.grouping.block_start_B.tolist(), ranges.first_block.tolist()
    bounds, y_NH = ranges.grouping.bounds.tolist(), y_TKH.flatten(0, 1)[order_N]
    sum_TH, out_TH = room(y_TKH)
    sums = {"ranges": ranges, "sum_TH": sum_TH, "out_TH": out_TH}
    for first, stop in zip([0, *edges[:-1]], edges, strict=True):
        for skip, size in ranges.windows(None):
            begin, end = first_block[first] + skip, first_block[stop]
            y_RH = torch.full((ranges.most_rows, y_NH.shape[1]), torch.nan, device=DEVICE)
            if begin < end:
                last = bounds[stop] if begin + size >= end else starts[begin + size]
                y_RH[: last - starts[begin]] = y_NH[starts[begin] : last]
            accumulate(y_RH, weights_TK, window=(first, stop, skip, size), **sums)
    return out_TH


@pytest.mark.parametrize("added_up", [reference_sum, triton_sum])
@pytest.mark.parametrize(("num_tokens", "top_k", "hidden"), [(7, 8, 517), (13, 3, 37), (2, 1, 1)])
def test_ranges_of_experts_are_no_part_of_a_sum(
    added_up: Callable[..., torch.Tensor], num_tokens: int, top_k: int, hidden: int
) -> None:
    y_TKH, weights_TK = make(num_tokens, top_k, hidden)
    whole = added_up([16], y_TKH, weights_TK)
    for edges in ([1, 16], [5, 6, 11, 16]):
        assert torch.equal(added_up(edges, y_TKH, weights_TK), whole)
    assert excess(whole[1:], y_TKH[1:], weights_TK[1:], torch.float32) <= 1
    assert not whole[0].any(), "padding"
    if top_k > 1:  # the controls: another order rounds otherwise, a missed range is far off
        turned = added_up([16], y_TKH.flip(1).contiguous(), weights_TK.flip(1))
        assert not torch.equal(turned, whole)
        assert excess(turned[1:], y_TKH[1:], weights_TK[1:], torch.float32) <= 1
        assert not torch.equal(added_up([0, 16], y_TKH, weights_TK * 2), whole)
