"""Experts of BF16 in 12 bits in the kernels: every bit of a weight, and with it every bit of a sum.

Plain records of the same weights are the oracle. Nothing here has a tolerance.
"""

from __future__ import annotations

import pytest
import torch

from hotset.checkpoint.lossless import pack_lossless
from hotset.core.formats import LOSSLESS
from hotset.experts.slots import POISON
from hotset.kernels import launch, moe_decode, moe_grouped
from hotset.kernels.dispatch import Kernels, ReferenceKernels, TritonKernels
from kernels.support import DEVICE, Experts, addresses_of, make_experts, make_inputs

TRITON, REFERENCE = TritonKernels(), ReferenceKernels()
EVERY = pytest.mark.parametrize("kernels", [TRITON, REFERENCE], ids=lambda kernels: kernels.name)
# Of a few tokens plain and packed records have kernels of their own.
TOKENS = pytest.mark.parametrize("num_tokens", [1, 9])
# Rows that are no whole groups of 8, and whole ones.
SHAPES = pytest.mark.parametrize("shape", [(53, 29), (48, 16)], ids=str)


@pytest.fixture(autouse=True)
def several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices take several steps along their columns, and few programs: both kinds of
    records the same, as with the launch shapes of the product."""
    monkeypatch.setattr(moe_decode, "ONE_TOKEN_UP", {2: launch.Tile(32, 16, 4, 3)})
    monkeypatch.setattr(moe_decode, "ONE_TOKEN_DOWN", {2: launch.Tile(32, 8, 4, 3)})
    tile = launch.Tile(32, 16, 4, 3)
    monkeypatch.setattr(moe_grouped, "grouped_tile", lambda *_, **_options: tile)


def both(hidden: int, intermediate: int) -> tuple[Experts, Experts]:
    """(plain, lossless) records of the same weights, with rare ones of every kind."""
    shape = {"hidden": hidden, "intermediate": intermediate, "bias": True, "dtype": "bfloat16"}
    plain = make_experts(3, **shape)
    packed = make_experts(3, weights=LOSSLESS, **shape)
    for expert in range(3):
        fields, target = plain.fields(expert), packed.fields(expert)
        for name in ("up", "down"):
            weights = fields[name]
            weights[1] *= 2.0**-110  # a row of small numbers, subnormal ones among them
            weights[2, ::3] = -0.0
            weights[:, 5] *= 2.0**-30  # one rare weight in every row
            weights[3] = 0.0
            weights[4, 7] = 2.0**100  # beside it the others are rare
            assert pack_lossless(weights, target, name)
            target[f"{name}_bias"].copy_(fields[f"{name}_bias"])
    return plain, packed


def outputs(kernels: Kernels, experts: Experts, num_tokens: int, **kwargs: object) -> torch.Tensor:
    x_TH, ids_TK = make_inputs(experts, num_tokens, 2, padding=False)
    ids_TK[0] = torch.tensor([0, 2])
    address_E = kwargs.pop("address_E", experts.addresses)
    return kernels.expert_outputs(x_TH, ids_TK, address_E, experts.spec, **kwargs)


@EVERY
@TOKENS
@SHAPES
def test_outputs_have_the_bits_of_plain_records(
    kernels: Kernels, num_tokens: int, shape: tuple[int, int]
) -> None:
    plain, packed = both(*shape)
    want = outputs(kernels, plain, num_tokens)
    assert want.isfinite().all() and want.abs().max() > 0
    assert torch.equal(outputs(kernels, packed, num_tokens), want)


@TOKENS
def test_a_rare_weight_that_is_not_looked_up_shows(num_tokens: int) -> None:
    """The control: one entry of the table, which one weight of one row uses."""
    plain, packed = both(53, 29)
    want = outputs(TRITON, plain, num_tokens)
    fields = packed.fields(0)
    first = fields["down_row"][0] >> 8
    fields["down_rare"].view(-1)[first] ^= 0x4000
    assert not torch.equal(outputs(TRITON, packed, num_tokens), want)


@TOKENS
def test_places_change_no_bit_and_fills_are_exact(num_tokens: int) -> None:
    plain, experts = both(53, 29)
    want = outputs(TRITON, plain, num_tokens)
    moved, slots = experts.copy(), Experts(experts.spec, torch.full_like(experts.records, 0xAB))
    first = torch.tensor([True, False, False], device=DEVICE)
    address_E = torch.where(first, experts.addresses, moved.addresses)
    fill_E = addresses_of(slots.records) * torch.tensor([True, False, True], device=DEVICE)
    assert torch.equal(
        outputs(TRITON, experts, num_tokens, address_E=address_E, fill_E=fill_E), want
    )
    for expert in (0, 2):
        for field, value in slots.fields(expert).items():
            source = experts.fields(expert)[field]
            assert torch.equal(value.view(torch.uint8), source.view(torch.uint8)), field
    assert (slots.records[1] == 0xAB).all()


@EVERY
@SHAPES
def test_whole_records_become_the_plain_ones(kernels: Kernels, shape: tuple[int, int]) -> None:
    plain, packed = both(*shape)
    made = Experts(plain.spec, torch.zeros_like(plain.records))
    kernels.dequantise_records(packed.addresses, packed.spec, made.records)
    for expert in range(3):
        for name, field in plain.fields(expert).items():
            bits = made.fields(expert)[name].view(torch.int16)
            assert torch.equal(bits, field.view(torch.int16)), name


@EVERY
@TOKENS
def test_poison_is_nan(kernels: Kernels, num_tokens: int) -> None:
    _, packed = both(53, 29)
    packed.records[0] = POISON
    out = outputs(kernels, packed, num_tokens)
    assert out[0, 0].isnan().all() and out[0, 1].isfinite().all()
