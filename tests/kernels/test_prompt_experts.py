"""Prompts' experts: a range at a time, in windows, against the outputs of all experts at once."""

from __future__ import annotations

import pytest
import torch

from hotset.core.formats import int4
from hotset.kernels.dispatch import ReferenceKernels, TritonKernels
from hotset.kernels.grouping import group_tokens
from hotset.kernels.moe_prompt import expert_rows
from hotset.kernels.ranges import Ranges, group_ranges, sort_choices
from kernels.support import DEVICE, Experts, make_experts, make_inputs

TRITON, REFERENCE = TritonKernels(), ReferenceKernels()
BLOCK, NUM_EXPERTS, TOP_K = 16, 6, 3


def routed(
    experts: Experts, num_tokens: int, *, most_rows: int = 2 * BLOCK
) -> tuple[torch.Tensor, torch.Tensor, Ranges]:
    """Inputs, weights, and ids of ascending rows, most of which expert 1 has, and expert 4 none."""
    x_TH, ids_TK = make_inputs(experts, num_tokens, TOP_K)
    ids_TK[ids_TK == 4] = 1
    weights_TK = torch.rand(num_tokens, TOP_K, generator=torch.Generator().manual_seed(5))
    ids_TK, weights_TK = sort_choices(ids_TK, weights_TK.to(DEVICE), NUM_EXPERTS)
    ranges = group_ranges(ids_TK, NUM_EXPERTS, block_tokens=BLOCK, most_rows=most_rows)
    return x_TH, weights_TK, ranges


def added(
    experts: Experts,
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    ranges: Ranges,
    edges: list[int],
    *,
    known: bool = False,
    kernels: TritonKernels | ReferenceKernels = TRITON,
) -> torch.Tensor:
    sum_TH = torch.full_like(x_TH, torch.nan, dtype=torch.float32)
    out_TH = torch.zeros_like(x_TH)
    first_block = ranges.first_block.tolist()
    for first, stop in zip([0, *edges[:-1]], edges, strict=True):
        # Outside the range addresses mean nothing.
        address_E = torch.full_like(experts.addresses, 64)
        address_E[first:stop] = experts.addresses[first:stop]
        kernels.add_experts(
            x_TH,
            weights_TK,
            address_E,
            experts.spec,
            ranges=ranges,
            first=first,
            stop=stop,
            sum_TH=sum_TH,
            out_TH=out_TH,
            num_blocks=first_block[stop] - first_block[first] if known else None,
        )
    return out_TH


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ranges_and_windows_change_no_bit(dtype: str) -> None:
    experts = make_experts(NUM_EXPERTS, hidden=37, intermediate=23, bias=True, dtype=dtype)
    x_TH, weights_TK, ranges = routed(experts, 50)
    whole = added(experts, x_TH, weights_TK, ranges, [6])
    for edges, known in (([6], True), ([1, 2, 5, 6], True), ([3, 6], False)):
        assert torch.equal(added(experts, x_TH, weights_TK, ranges, edges, known=known), whole)
    wide = routed(experts, 50, most_rows=16 * BLOCK)[2]
    assert torch.equal(added(experts, x_TH, weights_TK, wide, [2, 6]), whole)
    # Controls: a range left out, and another record.
    assert not torch.equal(added(experts, x_TH, weights_TK, ranges, [1]), whole)
    other = Experts(experts.spec, experts.records.roll(1, 0))
    assert not torch.equal(added(other, x_TH, weights_TK, ranges, [6]), whole)


def test_the_sum_is_that_of_the_outputs() -> None:
    """K products and sums in FP32 of outputs of either kernel: 23 and 37 terms in another order,
    at most (37 + 23 + 2 K) units of the last place of the sum of all terms' sizes."""
    experts = make_experts(NUM_EXPERTS, hidden=37, intermediate=23, bias=True, dtype="float32")
    x_TH, weights_TK, ranges = routed(experts, 50)
    got = added(experts, x_TH, weights_TK, ranges, [2, 6], known=True)
    want = added(experts, x_TH, weights_TK, ranges, [6], kernels=REFERENCE)
    y_TKH = REFERENCE.expert_outputs(x_TH, ranges.ids_TK, experts.addresses, experts.spec)
    size = (weights_TK[..., None] * y_TKH.abs()).sum(1).max()
    bound = (37 + 23 + 2 * TOP_K) * 2.0**-23 * 64 * size  # 64: terms within an output cancel
    assert (got - want).abs().max() <= bound
    assert (got - want.roll(1, 0)).abs().max() > 100 * bound, "control"


def test_joined_blocks_keep_their_bits() -> None:
    experts = make_experts(NUM_EXPERTS, hidden=37, intermediate=23, dtype="bfloat16")
    x_TH, weights_TK, ranges = routed(experts, 50)
    whole = added(experts, x_TH, weights_TK, ranges, [6])
    part = group_ranges(ranges.ids_TK[20:], NUM_EXPERTS, block_tokens=BLOCK, most_rows=64)
    alone = added(experts, x_TH[20:], weights_TK[20:].contiguous(), part, [6])
    assert torch.equal(alone, whole[20:])


def test_a_norm_comes_before_the_weights() -> None:
    """Outputs are clamped to a value that most exceed: sums are then near multiples of it."""
    experts = make_experts(NUM_EXPERTS, hidden=37, intermediate=23, dtype="float32")
    x_TH, weights_TK, ranges = routed(experts, 20)
    for kernels in (TRITON, REFERENCE):
        out_TH = torch.zeros_like(x_TH)
        kernels.add_experts(
            x_TH,
            weights_TK,
            experts.addresses,
            experts.spec,
            ranges=ranges,
            first=0,
            stop=NUM_EXPERTS,
            sum_TH=torch.full_like(x_TH, torch.nan),
            out_TH=out_TH,
            post_norm=torch.sign,
        )
        y_TKH = kernels.expert_outputs(x_TH, ranges.ids_TK, experts.addresses, experts.spec)
        want_TH = (weights_TK[..., None] * y_TKH.to(x_TH.dtype).sign()).sum(1)
        # K sums in FP32 of terms below 1 in two orders.
        assert (out_TH - want_TH).abs().max() <= TOP_K**2 * 2.0**-23


def test_packed_records() -> None:
    """Blocks too short to dequantise: the same weights, made in registers, as plain records."""
    packed = make_experts(
        NUM_EXPERTS,
        hidden=64,
        intermediate=32,
        dtype="bfloat16",
        weights=int4("bfloat16", group=32),
    )
    spec = packed.spec.as_plain()
    records = torch.zeros(NUM_EXPERTS, spec.record_bytes, dtype=torch.uint8, device=DEVICE)
    REFERENCE.dequantise_records(packed.addresses, packed.spec, records)
    x_TH, weights_TK, ranges = routed(packed, 20)
    got = added(packed, x_TH, weights_TK, ranges, [2, 6])
    want = added(Experts(spec, records), x_TH, weights_TK, ranges, [6], kernels=REFERENCE)
    # FP32 sums in another order move h by a unit of BF16 at most here and there, and then the sum.
    bound = 2 * 2.0**-8 * want.abs().max()
    assert (got - want).abs().max() <= bound
    assert (got - want.roll(1, 0)).abs().max() > 10 * bound, "control"


def test_windows_cover_a_range_once() -> None:
    ids_TK = torch.arange(400, device=DEVICE).view(100, 4) % 5
    ranges = group_ranges(ids_TK, 5, block_tokens=16, most_rows=50)
    assert ranges.most_blocks == 3 and ranges.most_rows == 48
    assert list(ranges.windows(0)) == []
    assert list(ranges.windows(7)) == [(0, 3), (3, 3), (6, 1)]
    assert list(ranges.windows(4)) == [(0, 2), (2, 2)], "even ones"
    asked: list[int] = []
    windows = ranges.windows(lambda: asked.append(7) or 7)
    assert next(windows) == (0, 3) and not asked, "one window runs while the host waits"
    assert list(windows) == [(3, 2), (5, 2)] and asked == [7], "even ones"
    assert list(ranges.windows(lambda: 3)) == [(0, 3)]
    blocks = [block for start, size in ranges.windows(None) for block in range(start, start + size)]
    assert blocks == list(range(ranges.grouping.num_blocks))
    grouping = group_tokens(ids_TK, 5, block_tokens=16)
    assert ranges.first_block.tolist() == [0, 5, 10, 15, 20, 25]
    places = ranges.place_TK.flatten()
    assert torch.equal(grouping.order_N[places.long()], torch.arange(400, device=DEVICE).int())


@pytest.mark.parametrize("kernels", [TRITON, REFERENCE])
def test_a_token_without_experts_gets_nothing(kernels) -> None:
    """Neither does one whose last expert is still to come."""
    experts = make_experts(NUM_EXPERTS, hidden=37, intermediate=23, dtype="bfloat16")
    x_TH, weights_TK, _ = routed(experts, 20)
    ids_TK = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE).expand(20, 3).clone()
    ids_TK[3] = NUM_EXPERTS
    ids_TK[4] = torch.tensor([1, 1, NUM_EXPERTS])
    ranges = group_ranges(ids_TK, NUM_EXPERTS, block_tokens=BLOCK, most_rows=BLOCK)
    before = added(experts, x_TH, weights_TK, ranges, [2, 5], kernels=kernels)
    assert before[4].any() and not before[:4].any() and not before[5:].any()
    whole = added(experts, x_TH, weights_TK, ranges, [2, 5, 6], kernels=kernels)
    assert not whole[3].any() and torch.equal(whole[4], before[4])
    assert whole[torch.arange(20) != 3].any(dim=1).all() and not whole.isnan().any()


def test_a_window_behind_the_range_writes_nothing() -> None:
    experts = make_experts(NUM_EXPERTS, hidden=37, intermediate=23, dtype="bfloat16")
    x_TH, _, ranges = routed(experts, 50)
    h_RI = x_TH.new_full((ranges.most_rows, 23), 7)
    y_RH = torch.full((ranges.most_rows, 37), 7.0, device=DEVICE)
    window = (0, 2, 1000, 2)
    expert_rows(
        x_TH, experts.addresses, experts.spec, ranges=ranges, window=window, h_RI=h_RI, y_RH=y_RH
    )
    assert (h_RI == 7).all() and (y_RH == 7).all()
