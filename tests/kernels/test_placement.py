"""Where a record lies must not matter, what lies there must: addresses, absences and fills."""

from __future__ import annotations

import pytest
import torch

from hotset.kernels.dispatch import Kernels, ReferenceKernels, TritonKernels
from kernels.support import DEVICE, Experts, addresses_of, make_experts, make_inputs

BOTH = pytest.mark.parametrize(
    "kernels", [TritonKernels(), ReferenceKernels()], ids=lambda k: k.name
)
TOKENS = pytest.mark.parametrize("num_tokens", [1, 7, 40])


def some_experts(dtype: str = "bfloat16") -> Experts:
    return make_experts(6, hidden=37, intermediate=23, bias=True, dtype=dtype)


@BOTH
@TOKENS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_bytes_elsewhere_give_equal_bits(
    kernels: Kernels, num_tokens: int, dtype: str
) -> None:
    experts = some_experts(dtype)
    moved = experts.copy()
    x_TH, ids_TK = make_inputs(experts, num_tokens, 3)
    home_E, away_E = experts.addresses, moved.addresses
    expected = kernels.expert_outputs(x_TH, ids_TK, home_E, experts.spec)
    for seed in range(3):
        choose = torch.Generator().manual_seed(seed)
        where = (torch.rand(len(home_E), generator=choose) < 0.5).to(DEVICE)
        address_E = torch.where(where, home_E, away_E)
        assert torch.equal(kernels.expert_outputs(x_TH, ids_TK, address_E, experts.spec), expected)


@BOTH
@TOKENS
def test_control_one_other_address_changes_the_output(kernels: Kernels, num_tokens: int) -> None:
    """Without this, a kernel that read a fixed buffer would pass the test above."""
    experts = some_experts()
    x_TH, ids_TK = make_inputs(experts, num_tokens, 3, padding=False)
    address_E = experts.addresses
    expected = kernels.expert_outputs(x_TH, ids_TK, address_E, experts.spec)
    routed = int(ids_TK[0, 0])
    address_E[routed] = address_E[(routed + 1) % len(address_E)].clone()
    changed = kernels.expert_outputs(x_TH, ids_TK, address_E, experts.spec)
    assert not torch.equal(changed[ids_TK == routed], expected[ids_TK == routed])
    assert torch.equal(changed[ids_TK != routed], expected[ids_TK != routed])


@BOTH
@TOKENS
def test_absent_experts_leave_a_given_output_alone(kernels: Kernels, num_tokens: int) -> None:
    experts = some_experts()
    x_TH, ids_TK = make_inputs(experts, num_tokens, 3)
    present = torch.tensor([True, False] * 3, device=DEVICE)
    address_E = experts.addresses * present
    whole = kernels.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)

    padded = (ids_TK < 0) | (ids_TK >= 6)
    absent = ~padded & ~present[ids_TK.clamp(0, 5)]
    out = torch.full_like(whole, 7.0)
    got = kernels.expert_outputs(x_TH, ids_TK, address_E, experts.spec, out=out)
    assert got is out
    assert torch.equal(out[absent], torch.full_like(out[absent], 7.0))
    assert torch.equal(out[~absent], whole[~absent])
    assert not out[padded].any()

    fresh = kernels.expert_outputs(x_TH, ids_TK, address_E, experts.spec)
    assert not fresh[absent].any()
    assert torch.equal(fresh[~absent], whole[~absent])


@BOTH
@TOKENS
def test_groups_of_experts_in_turn_equal_one_call(kernels: Kernels, num_tokens: int) -> None:
    experts = some_experts()
    x_TH, ids_TK = make_inputs(experts, num_tokens, 3)
    whole = kernels.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)
    grouping = kernels.group(ids_TK, 6)
    out = torch.full_like(whole, torch.nan)
    for group in ([4, 0], [1], [2, 3, 5]):
        address_E = torch.zeros_like(experts.addresses)
        address_E[group] = experts.addresses[group]
        kernels.expert_outputs(x_TH, ids_TK, address_E, experts.spec, grouping=grouping, out=out)
    assert torch.equal(out, whole)


@BOTH
@TOKENS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fills_are_exact_and_change_nothing(kernels: Kernels, num_tokens: int, dtype: str) -> None:
    experts = some_experts(dtype)
    experts.fields(0)["up"][0, 0] = torch.nan  # bits that no conversion may touch
    x_TH, ids_TK = make_inputs(experts, num_tokens, 3)
    ids_TK[0] = torch.tensor([0, 0, 3])  # equal ids in a row: one fill
    expected = kernels.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)

    slots = Experts(experts.spec, torch.full_like(experts.records, 0xAB))
    untouched = slots.records.clone()
    wanted = torch.tensor([True, True, False, True, True, False], device=DEVICE)
    got = kernels.expert_outputs(
        x_TH,
        ids_TK,
        experts.addresses,
        experts.spec,
        fill_E=addresses_of(slots.records) * wanted,
    )
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    for expert in range(6):
        if wanted[expert] and (ids_TK == expert).any():
            for name, value in slots.fields(expert).items():
                source = experts.fields(expert)[name]
                assert torch.equal(value.view(torch.uint8), source.view(torch.uint8)), name
        else:
            assert torch.equal(slots.records[expert], untouched[expert])


@BOTH
def test_absent_experts_are_not_filled(kernels: Kernels) -> None:
    experts = some_experts()
    slots = torch.full_like(experts.records, 0xAB)
    for num_tokens in (1, 7):
        x_TH, ids_TK = make_inputs(experts, num_tokens, 3)
        kernels.expert_outputs(
            x_TH,
            ids_TK,
            torch.zeros_like(experts.addresses),
            experts.spec,
            fill_E=addresses_of(slots),
        )
    assert (slots == 0xAB).all()
