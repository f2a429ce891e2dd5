"""Quantised records as bytes: where they lie, how they are filled, and dequantised as a whole."""

from __future__ import annotations

import pytest
import torch

from hotset.kernels import launch, moe_grouped
from hotset.kernels.dispatch import Kernels, ReferenceKernels, TritonKernels
from kernels.packed_support import FORMATS, KINDS, packed_experts
from kernels.support import DEVICE, Experts, addresses_of, make_inputs

TRITON, REFERENCE = TritonKernels(), ReferenceKernels()
EVERY = pytest.mark.parametrize("name", FORMATS)
# One for each field that a record can have.
EVERY_FIELD = pytest.mark.parametrize("name", ["fp8 block", "int4 order", "nvfp4"])
TOKENS = pytest.mark.parametrize("num_tokens", [1, 5])


def some_experts(name: str) -> Experts:
    return packed_experts(name, 3, hidden=21, intermediate=11, bias=True, dtype="bfloat16")


@EVERY_FIELD
@TOKENS
def test_places_change_no_bit_and_fills_are_exact(name: str, num_tokens: int) -> None:
    experts = some_experts(name)
    x_TH, ids_TK = make_inputs(experts, num_tokens, 2, padding=False)
    ids_TK[0] = torch.tensor([0, 2])
    expected = TRITON.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)

    moved, slots = experts.copy(), Experts(experts.spec, torch.full_like(experts.records, 0xAB))
    address_E = torch.where(
        torch.tensor([True, False, False], device=DEVICE), experts.addresses, moved.addresses
    )
    wanted = torch.tensor([True, True, False], device=DEVICE)
    fill_E = addresses_of(slots.records) * wanted
    got = TRITON.expert_outputs(x_TH, ids_TK, address_E, experts.spec, fill_E=fill_E)
    assert torch.equal(got, expected)
    for expert in range(3):
        if wanted[expert] and (ids_TK == expert).any():
            for field, value in slots.fields(expert).items():
                source = experts.fields(expert)[field]
                assert torch.equal(value.view(torch.uint8), source.view(torch.uint8)), field
        else:
            assert (slots.records[expert] == 0xAB).all()


@EVERY
def test_whole_records_dequantise_to_equal_bits(name: str) -> None:
    experts = some_experts(name)
    address_E = experts.addresses
    address_E[1] = 0
    plain = experts.spec.as_plain()
    found = []
    for kernels in (TRITON, REFERENCE):
        out = torch.full((3, plain.record_bytes), 0xAB, dtype=torch.uint8, device=DEVICE)
        kernels.dequantise_records(address_E, experts.spec, out)
        assert (out[1] == 0xAB).all()  # no address, nothing written
        found.append(out)
    assert torch.equal(*found)


@pytest.mark.parametrize("kernels", [TRITON, REFERENCE])
def test_records_without_tokens_are_neither_read_nor_written(kernels: Kernels) -> None:
    experts = some_experts("int4")
    plain_bytes = experts.spec.as_plain().record_bytes
    counts = torch.tensor([7, 0, 3, 0, 1], dtype=torch.int32, device=DEVICE)[1:4]  # of a range
    address_N = experts.addresses.clone()
    want = torch.full((3, plain_bytes), 0xAB, dtype=torch.uint8, device=DEVICE)
    kernels.dequantise_records(address_N, experts.spec, want)
    address_N[[0, 2]] = 64  # nothing may be read there
    out = torch.full_like(want, 0xAB)
    kernels.dequantise_records(address_N, experts.spec, out, counts_N=counts)
    assert torch.equal(out[1], want[1]) and bool((out[[0, 2]] == 0xAB).all())


def output(kernels: Kernels, experts: Experts) -> torch.Tensor:
    x_TH, ids_TK = make_inputs(experts, 9, 1, padding=False)  # more than `moe_few` takes
    return kernels.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)


def dequantised(kernels: Kernels, experts: Experts) -> Experts:
    plain = experts.spec.as_plain()
    out = torch.zeros(len(experts.records), plain.record_bytes, dtype=torch.uint8, device=DEVICE)
    kernels.dequantise_records(experts.addresses, experts.spec, out)
    return Experts(plain, out)


@pytest.mark.parametrize("name", KINDS)
def test_products_of_dequantised_records_have_equal_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one tile for both, so that sums have one order: then the weights are equal.

    With another tile they differ by the order of sums alone, which the bounds of sums hold.
    """
    experts = some_experts(name)
    tile = launch.Tile(32, 64, 4, 2)
    monkeypatch.setattr(moe_grouped, "grouped_tile", lambda *_, **_options: tile)
    for kernels in (TRITON, REFERENCE):
        plain = dequantised(kernels, experts)
        assert torch.equal(output(kernels, plain), output(kernels, experts))
        # Control: one weight of one expert.
        plain.fields(0)["down"][:, 5] += 1
        assert not torch.equal(output(kernels, plain), output(kernels, experts))
