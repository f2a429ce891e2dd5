"""Grouping by expert: both forms against a plain loop, and no question asked of the device."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hotset.kernels.grouping import (
    Grouping,
    group_by_sorting,
    group_in_one_program,
    group_tokens,
    max_blocks,
)
from kernels.support import DEVICE

FORMS = pytest.mark.parametrize("form", [group_by_sorting, group_in_one_program])


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


def test_more_pairs_than_one_program_takes() -> None:
    ids = torch.randint(0, 128, (300, 8), generator=torch.Generator().manual_seed(0))
    grouping = group_tokens(ids.to(DEVICE), 128)
    check(grouping, ids.flatten().tolist(), 128, grouping.block_tokens)


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
