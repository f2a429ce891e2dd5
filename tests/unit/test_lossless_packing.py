"""BF16 weights in 12 bits: every bit comes back, whatever the weights, or it is said that they do
not fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.checkpoint.lossless import pack_lossless
from hotset.core.formats import LOSSLESS, lossless_fields
from hotset.kernels.dequantise import dequantise_matrix, unpack_lossless

Fields = dict[str, torch.Tensor]


def fields_for(rows: int, columns: int) -> Fields:
    """Of a record that held something else before."""
    specs = lossless_fields("up", rows=rows, columns=columns)
    return {name: torch.full(shape, 0x55, dtype=getattr(torch, d)) for name, shape, d in specs}


def normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=source) * 0.02).bfloat16()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


def comes_back(weights: torch.Tensor) -> Fields:
    fields = fields_for(*weights.shape)
    assert pack_lossless(weights, fields, "up")
    assert same_bits(unpack_lossless(fields, "up", columns=weights.shape[1]), weights)
    return fields


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (7, 37), (130, 600)], ids=str)
def test_normal_weights_come_back(shape: tuple[int, int]) -> None:
    comes_back(normal(*shape))


@pytest.mark.parametrize("lowest", [1, 2, 113, 240])
def test_all_numbers_of_15_exponents_have_codes(lowest: int) -> None:
    """From the smallest normal number to the largest finite one, of either sign."""
    numbers = torch.arange(lowest * 128, (lowest + 15) * 128, dtype=torch.int32)
    weights = torch.stack([numbers, numbers | 0x8000]).to(torch.int16).view(torch.bfloat16)
    fields = comes_back(weights)
    assert (fields["up_row"] & 0xFF == lowest - 1).all() and not fields["up_rare"].any()


def test_rare_weights_of_every_kind() -> None:
    weights = normal(16, 640)
    weights[0] = 0.0
    weights[1, ::2], weights[1, 1::4] = 0.0, -0.0
    weights[2, 5] = torch.finfo(torch.bfloat16).max
    weights[3] *= 2.0**-115
    weights[4, 100:110] = torch.arange(1, 11).to(torch.int16).view(torch.bfloat16)  # subnormal
    comes_back(weights)


def test_equal_rare_weights_share_a_place() -> None:
    """So pruned weights fit: half of them zeros, of either sign."""
    weights = normal(8, 512)
    weights[:, ::2] *= 0.0
    fields = comes_back(weights)
    codes = fields["up_exponent"].view(torch.int32)[:, :, None] >> torch.arange(0, 32, 4)
    assert ((codes & 0xF) == 0).sum() >= 8 * 256


@pytest.mark.parametrize(("rows", "columns", "most"), [(2, 64, 4), (40, 4096, 256)])
def test_what_does_not_fit_is_said(rows: int, columns: int, most: int) -> None:
    """More different rare weights than the table has places, or than a byte can number."""
    rare = torch.arange(1, 258).to(torch.int16).view(torch.bfloat16)
    weights = torch.ones(rows, columns, dtype=torch.bfloat16)
    weights[1, :most] = rare[:most]
    comes_back(weights)
    weights[1, most] = rare[most]
    assert not pack_lossless(weights, fields_for(rows, columns), "up")


def test_parts_of_a_matrix_are_packed_apart() -> None:
    """As gate and up rows are, which may come from two files."""
    weights = normal(24, 300)
    weights[5, 5], weights[20, 7] = 2.0**-60, 2.0**-70
    fields = fields_for(24, 300)
    for rows in (slice(12, 24), slice(0, 12)):
        assert pack_lossless(weights[rows], fields, "up", first_row=rows.start)
    assert same_bits(unpack_lossless(fields, "up", columns=300), weights)


def test_a_wrong_base_code_or_place_shows() -> None:
    weights = normal(4, 64)
    weights[0, 9] = 2.0**-80
    for name in ("up", "up_exponent", "up_row", "up_rare"):
        fields = comes_back(weights)
        fields[name][0].view(-1)[:2] ^= 1
        assert not same_bits(unpack_lossless(fields, "up", columns=64), weights), name


def test_kernels_get_numbers_of_fp32() -> None:
    fields = comes_back(normal(4, 64))
    got = dequantise_matrix(fields, "up", LOSSLESS, halves=2, columns=64)
    assert got.dtype == torch.float32 and torch.equal(got, normal(4, 64).float())


@settings(max_examples=60, deadline=None)
@given(
    bits=st.lists(st.integers(0, 0xFFFF).filter(lambda b: b & 0x7F80 != 0x7F80), min_size=1),
    columns=st.integers(1, 40),
)
def test_any_finite_bits_come_back_or_do_not_fit(bits: list[int], columns: int) -> None:
    rows = -(-len(bits) // columns)
    padded = torch.tensor((bits * columns)[: rows * columns], dtype=torch.int32)
    weights = padded.to(torch.int16).view(torch.bfloat16).view(rows, columns)
    fields = fields_for(rows, columns)
    if pack_lossless(weights, fields, "up"):
        assert same_bits(unpack_lossless(fields, "up", columns=columns), weights)


def test_about_twelve_bits_a_weight() -> None:
    """At the shape of Qwen3-30B-A3B's experts: 12, and 0.06 to 0.11 for bases and the table."""
    for rows, columns in ((1536, 2048), (2048, 768)):
        num_bytes = sum(value.nbytes for value in fields_for(rows, columns).values())
        assert 12.0 < num_bytes * 8 / (rows * columns) < 12.2
