"""The fused rotary embedding against its specification, bit by bit, and against angles in FP64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotset.kernels.rotary import RotaryForm, accepts, reference, rotate
from kernels.support import DEVICE, EPS32

FORMS = {
    "halves": RotaryForm(),
    "one column a pair": RotaryForm(angles="single"),
    "neighbours to halves": RotaryForm("neighbours", "halves", "first"),
    "neighbours in FP32": RotaryForm("neighbours", "neighbours", "neighbours", wide=True),
    "neighbours, first half": RotaryForm("neighbours", "neighbours", "first"),
}
# [B, heads, T, D] and R: numbers of heads that are a power of two, none, and 1; elements that pass;
# R that is no power of two
SHAPES = [
    ((1, 4, 70, 64), 64),
    ((2, 6, 3, 32), 32),
    ((2, 1, 9, 24), 8),
    ((1, 3, 5, 40), 24),
]
HALF_DTYPES = [torch.bfloat16, torch.float16]


def make(
    shape: tuple[int, ...], rotary_dim: int, form: RotaryForm, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x as projections leave it, tokens outermost, and columns of which no two are equal."""
    batch, num_heads, num_tokens, dim = shape
    source = torch.Generator().manual_seed(0)
    columns = rotary_dim // 2 if form.angles == "single" else rotary_dim
    x = torch.randn(batch, num_tokens, num_heads, dim, generator=source)
    angle = torch.randn(1, num_tokens, columns, generator=source) * 9
    tensors = (x.transpose(1, 2), angle.cos(), angle.sin())
    x, cos, sin = (tensor.to(dtype).to(DEVICE) for tensor in tensors)
    return x, cos, sin


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "rotary_dim"), SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_bits_of_the_specification(
    form: RotaryForm, shape: tuple[int, ...], rotary_dim: int, dtype: torch.dtype
) -> None:
    x, cos, sin = make(shape, rotary_dim, form, dtype)
    got = rotate(x, cos, sin, form, heads_at=1)
    want = reference(x, cos[:, None], sin[:, None], form)
    assert torch.equal(got, want) and got.dtype == dtype
    # Laid out as it came, so that nobody copies it.
    assert got.stride() == x.stride()
    other_way = rotate(x.transpose(1, 2), cos, sin, form, heads_at=2)
    assert torch.equal(other_way.transpose(1, 2), want)


@pytest.mark.parametrize("form", [FORMS["halves"], FORMS["neighbours in FP32"]], ids=str)
def test_against_complex_numbers(form: RotaryForm) -> None:
    """A pair is multiplied with exp(i angle). Two products and a sum, each rounded once: within
    three eps of |a| + |b|, as no sine is above 1."""
    x, cos, _ = make((1, 4, 70, 64), 64, form, torch.float32)
    angle = torch.arange(70.0, dtype=torch.float64)[:, None] * 0.7 ** torch.arange(32.0)
    step = angle.repeat_interleave(2, 1) if form.source == "neighbours" else angle.repeat(1, 2)
    cos, sin = step.cos()[None].float().to(DEVICE), step.sin()[None].float().to(DEVICE)
    got = rotate(x, cos, sin, form, heads_at=1).cpu().double()
    a, b = pairs(x.cpu().double(), form)
    want = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    got_a, got_b = pairs(got, form)
    off = torch.maximum((got_a - want.real).abs(), (got_b - want.imag).abs())
    assert bool((off <= 3 * EPS32 * (a.abs() + b.abs())).all())


def pairs(x: torch.Tensor, form: RotaryForm) -> tuple[torch.Tensor, torch.Tensor]:
    if form.source == "neighbours":
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


@pytest.mark.parametrize(
    "mistake",
    [{"source": "neighbours"}, {"target": "neighbours"}, {"angles": "first"}, {"wide": True}],
    ids=str,
)
def test_the_control_another_form_has_other_bits(mistake: dict[str, object]) -> None:
    right = FORMS["halves"]
    x, cos, sin = make((2, 6, 3, 32), 32, right, torch.bfloat16)
    cos = cos + torch.linspace(0, 1, 32, device=DEVICE).to(cos.dtype)
    wrong = rotate(x, cos, sin, replace(right, **mistake), heads_at=1)  # type: ignore[arg-type]
    assert float((wrong != rotate(x, cos, sin, right, heads_at=1)).float().mean()) > 0.1


def test_part_of_a_wider_tensor_and_angles_of_each_row() -> None:
    """As the rotary part of a head is cut out, where a batch has positions of its own."""
    form = FORMS["neighbours to halves"]
    whole, cos, sin = make((2, 4, 7, 48), 16, form, torch.bfloat16)
    x = whole[..., 32:]
    cos, sin = torch.cat((cos, sin)), torch.cat((sin, cos))
    got = rotate(x, cos, sin, form, heads_at=1)
    assert torch.equal(got, reference(x, cos[:, None], sin[:, None], form))


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_angles_in_fp32(dtype: torch.dtype) -> None:
    form = FORMS["neighbours in FP32"]
    x, cos, sin = make((2, 6, 3, 32), 32, form, torch.float32)
    x = x.to(dtype)
    got = rotate(x, cos, sin, form, heads_at=1)
    assert torch.equal(got, reference(x, cos[:, None], sin[:, None], form)) and got.dtype == dtype


def test_what_is_not_taken() -> None:
    form = FORMS["halves"]
    x, cos, sin = make((2, 6, 3, 32), 32, form, torch.bfloat16)
    assert accepts(x, cos, sin, form, heads_at=1)
    assert accepts(x, cos[..., :8], sin[..., :8], form, heads_at=1)
    assert not accepts(x, cos, sin, form, heads_at=2)
    assert not accepts(x[..., :16], cos, sin, form, heads_at=1)
    assert not accepts(x, cos.float(), sin.float(), form, heads_at=1)
    assert not accepts(x, cos, sin[:, :2], form, heads_at=1)
    assert not accepts(x.transpose(2, 3), cos, sin, form, heads_at=1)
    assert not accepts(x[0], cos, sin, form, heads_at=1)
    assert not accepts(x.double(), cos.double(), sin.double(), form, heads_at=1)
