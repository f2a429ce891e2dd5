"""Grouping by expert: all forms against a plain loop, and no question asked of the device."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hotset.kernels import group_sort
from hotset.kernels.grouping import (
    Grouping,
    group_by_counting,
    group_by_sorting,
    group_in_one_program,
    group_tokens,
    max_blocks,
)
from hotset.kernels.ranges import group_ranges, sort_choices, sort_choices_in_one_launch
from kernels.support import DEVICE

FORMS = pytest.mark.parametrize("form", [group_by_sorting, group_in_one_program, group_by_counting])


def check(grouping: Grouping, ids: list[int], num_experts: int, block_tokens: int) -> None:
    pairs = defaultdict(list)
    for pair, expert in enumerate(ids):
        pairs[expert if 0 <= expert < num_experts else num_experts].append(pair)
    order, bounds = grouping.order_N.tolist(), grouping.bounds.tolist()
    assert order == [pair for expert in sorted(pairs) for pair in pairs[expert]]
    assert grouping.counts_E.tolist() == [len(pairs[e]) for e in range(num_experts)]
    assert [order[bounds[e] : bounds[e + 1]] for e in range(num_experts + 1)] == [
        pairs[e] for e in range(num_experts + 1)
    ]
    blocks = [
        (expert, bounds[expert] + first)
        for expert in sorted(pairs)
        for first in range(0, len(pairs[expert]), block_tokens)
    ]
    experts, starts = grouping.block_expert_B.tolist(), grouping.block_start_B.tolist()
    assert list(zip(experts, starts, strict=True))[: len(blocks)] == blocks
    assert all(expert == -1 for expert in experts[len(blocks) :])
    assert grouping.num_blocks == max_blocks(len(ids), num_experts, block_tokens)


@FORMS
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_routing(form, data: st.DataObject) -> None:
    num_experts = data.draw(st.sampled_from([1, 2, 7, 16]))
    top_k = data.draw(st.integers(1, 4))
    num_tokens = data.draw(st.integers(1, 12))
    block_tokens = data.draw(st.sampled_from([1, 4, 16]))
    ids = st.lists(
        st.integers(-2, num_experts + 2), min_size=num_tokens * top_k, max_size=num_tokens * top_k
    )
    flat = data.draw(ids)
    ids_TK = torch.tensor(flat, device=DEVICE).view(num_tokens, top_k)
    check(form(ids_TK, num_experts, block_tokens), flat, num_experts, block_tokens)


@FORMS
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(16, 8, 128), (25, 10, 512), (1, 8, 128), (256, 1, 3)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_shapes_of_real_models(form, num_tokens, top_k, num_experts, dtype) -> None:
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, num_experts + 1, (num_tokens, top_k), generator=source)
    grouping = form(ids.to(dtype).to(DEVICE), num_experts, 16)
    check(grouping, ids.flatten().tolist(), num_experts, 16)


@pytest.mark.parametrize("form", [group_tokens, group_by_counting])
def test_more_pairs_than_one_program_takes(form) -> None:
    ids = torch.randint(0, 128, (300, 8), generator=torch.Generator().manual_seed(0))
    grouping = form(ids.to(DEVICE), 128, block_tokens=64)
    check(grouping, ids.flatten().tolist(), 128, 64)


def test_more_parts_than_are_summed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_sort, "_SUMMED", 2)
    ids = torch.randint(-1, 4, (900, 1), generator=torch.Generator().manual_seed(0))
    check(group_by_counting(ids.to(DEVICE), 3, 16), ids.flatten().tolist(), 3, 16)


@pytest.mark.parametrize("sort", [sort_choices, sort_choices_in_one_launch])
def test_choices_of_a_token_by_expert(sort) -> None:
    """Of ids and weights in any strides; equal ids stay in their order, padding comes last."""
    ids_TK = torch.randint(-1, 8, (6, 37), generator=torch.Generator().manual_seed(0)).T[:, :5]
    weights_TK = torch.arange(37 * 8, dtype=torch.bfloat16).view(37, 8)[:, 2:7]
    got_ids, got_weights = sort(ids_TK.to(DEVICE), weights_TK.to(DEVICE), 7)
    assert got_ids.dtype == torch.int32 and got_ids.is_contiguous() and got_weights.is_contiguous()
    for token in range(37):
        rows = zip(ids_TK[token].tolist(), weights_TK[token].tolist(), strict=True)
        want = sorted(((i if 0 <= i < 7 else 7, w) for i, w in rows), key=lambda one: one[0])
        got = zip(got_ids[token].tolist(), got_weights[token].tolist(), strict=True)
        assert list(got) == want


def test_places_and_first_blocks_of_both_forms() -> None:
    ids_TK = torch.randint(-1, 6, (100, 3), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    place_N = torch.empty(300, dtype=torch.int32, device=DEVICE)
    first_block = torch.empty(6, dtype=torch.int32, device=DEVICE)
    grouping = group_by_counting(ids_TK, 5, 16, place_N=place_N, first_block=first_block)
    assert torch.equal(grouping.order_N[place_N.long()], torch.arange(300, device=DEVICE).int())
    blocks_E = (grouping.counts_E + 15) // 16
    assert first_block.tolist() == [0, *blocks_E.cumsum(0).tolist()]
    ranges = group_ranges(ids_TK, 5, block_tokens=16, most_rows=64)
    assert torch.equal(ranges.place_TK.flatten(), place_N)
    assert torch.equal(ranges.first_block, first_block)


def test_no_tokens() -> None:
    grouping = group_tokens(torch.zeros(0, 8, dtype=torch.int64, device=DEVICE), 4)
    assert grouping.num_blocks == 0 and grouping.counts_E.tolist() == [0] * 4


class HostQuestions(TorchDispatchMode):
    """Records the operators that would make the host wait for a device."""

    WAIT = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in self.WAIT):
            self.asked.append(str(func))
        return func(*args, **(kwargs or {}))


def test_sorting_asks_the_device_nothing() -> None:
    ids_TK = torch.randint(-1, 9, (300, 8), device=DEVICE)
    with HostQuestions() as questions:
        group_by_sorting(ids_TK, 8, 64)
    assert questions.asked == []
    with HostQuestions() as questions:
        ids_TK[0, 0].item()  # control: the spy sees a question
    assert questions.asked
