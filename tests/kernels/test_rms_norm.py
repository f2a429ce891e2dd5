"""The fused norm against its formula: all forms, odd widths, rows of very different size."""

from __future__ import annotations

import pytest
import torch

from hotset.kernels.rms_norm import NormForm, reference, rms_norm
from kernels.support import DEVICE, EPS32

FORMS = {
    "weight of what is rounded": NormForm(1e-6, rounds_first=True),
    "weight before rounding": NormForm(1e-5),
    "one and a weight": NormForm(1e-6, offset=1.0),
}
# [rows .., H]: a hidden size, heads, a width that is no power of two, a single row
SHAPES = [(3, 256), (2, 5, 16), (7, 100), (1, 64)]


def make(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-4, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    x = torch.randn(shape, generator=source) * sizes
    return x.to(dtype).to(DEVICE), torch.randn(shape[-1:], generator=source).to(dtype).to(DEVICE)


def excess(
    got: torch.Tensor, x: torch.Tensor, weight_H: torch.Tensor | None, form: NormForm
) -> float:
    """Largest |error| / bound, against FP64.

    The mean of H squares errs by sqrt(H) eps of itself at most, and half of that reaches the norm;
    root, products and the weight's sum err by some eps more. Then one rounding or two, half a unit
    each.
    """
    n = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + form.eps)
    want = n if weight_H is None else n * (weight_H.double() + form.offset)
    unit = torch.finfo(x.dtype).eps
    roundings = 2 if form.rounds_first and weight_H is not None else 1
    relative = EPS32 * (x.shape[-1] ** 0.5 / 2 + 8) + roundings * unit / 2 * (1 + unit)
    # The sum 1 + w is rounded before it is multiplied with.
    reach = want.abs() if not form.offset or weight_H is None else want.abs() + EPS32 * n.abs()
    least = torch.finfo(x.dtype).smallest_normal
    return float(((got.double() - want).abs() / (relative * reach + least)).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_against_the_formula(form: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight_H = make(shape, dtype)
    for weight in (weight_H, None):
        got = rms_norm(x, weight, FORMS[form])
        assert got.shape == x.shape and got.dtype == dtype
        assert excess(got, x, weight, FORMS[form]) <= 1
        assert excess(reference(x, weight, FORMS[form]), x, weight, FORMS[form]) <= 1


@pytest.mark.parametrize(
    "mistake",
    [NormForm(1e-6), NormForm(1e-4, rounds_first=True), NormForm(1e-6, offset=1.0)],
    ids=str,
)
def test_the_control_another_form_is_caught(mistake: NormForm) -> None:
    """By its value or, where it differs in roundings only, by the elements that these move."""
    x, weight_H = make((3, 256), torch.bfloat16)
    right = FORMS["weight of what is rounded"]
    got, want = rms_norm(x, weight_H, mistake), reference(x, weight_H, right)
    assert float((got != want).float().mean()) > 0.05
    own = rms_norm(x, weight_H, right)
    assert float((own != want).float().mean()) < 0.005


def test_a_row_is_its_own() -> None:
    x, weight_H = make((7, 100), torch.bfloat16)
    form = FORMS["weight of what is rounded"]
    whole = rms_norm(x, weight_H, form)
    for row in range(len(x)):
        assert torch.equal(rms_norm(x[row : row + 1], weight_H, form)[0], whole[row])


def test_strided_rows() -> None:
    x, weight_H = make((7, 100), torch.float32)
    strided = x.t().contiguous().t()
    form = FORMS["weight before rounding"]
    assert torch.equal(rms_norm(strided, weight_H, form), rms_norm(x, weight_H, form))
