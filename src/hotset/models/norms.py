"""Stock modules that compute a root mean square norm do it in one launch (`kernels/rms_norm`).

Stock code takes six passes over memory for it, most of them in FP32. Which modules compute such a
norm, and in which form, is asked of a small copy of each kind, so that no class is listed. Where a
compiler looks at a model, it sees the stock code. Knows modules; nothing of where they stand in a
model.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn

from hotset.kernels.rms_norm import NormForm, reference, rms_norm
from hotset.models.kinds import by_form, refit

# Rows of different sizes, so that `eps` shows in some; widths are those of the module.
_PROBE_SIZES = (1e-4, 1e-3, 1e-2, 0.3, 1.0, 7.0)
# Stock forms write the root in several ways, which differ in the last bit of FP32: that moves a
# rounding to 8 bits in one of 2^15 elements or so, and another form moves a tenth of them.
_MOST_UNEQUAL = 1e-2


def fuse_norms(model: nn.Module) -> int:
    """Gives each norm of a model on a GPU its fused form.

    Args:
        model: a stock model with its weights.

    Returns:
        How many there are.
    """
    return refit(model, by_form(find_form, _fused))


def find_form(module: nn.Module) -> NormForm | None:
    """The form of a norm, shown with random numbers in the dtype of the model; `None` where no form
    gives what the module does."""
    if not _may_be_norm(module):
        return None
    twin = copy.deepcopy(module).cpu()
    weight = getattr(twin, "weight", None)
    dtype = torch.bfloat16 if weight is None else weight.dtype
    width = 64 if weight is None else weight.numel()
    source = torch.Generator().manual_seed(0)
    x = torch.randn(len(_PROBE_SIZES), 8, width, generator=source)
    x = (x * torch.tensor(_PROBE_SIZES)[:, None, None]).to(dtype)
    with torch.no_grad():
        if weight is not None:
            weight.copy_(torch.randn(width, generator=source))
        try:
            want = twin(x)
        except RuntimeError:  # rows of another shape are what it takes
            return None
    if not isinstance(want, torch.Tensor) or want.dtype != dtype or want.shape != x.shape:
        return None
    return next((form for form in _candidates(module) if _agrees(form, x, weight, want)), None)


def _may_be_norm(module: nn.Module) -> bool:
    """One tensor comes in, and nothing that may be left out; a row of weights or none, a small
    constant, and nothing else that it could compute with."""
    if module._modules or module._buffers or not _constants(module):
        return False
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    parameters = dict(module.named_parameters())
    weight = parameters.pop("weight", None)
    return not parameters and (weight is None or weight.dim() == 1)


def _constants(module: nn.Module) -> list[float]:
    """Numbers that may be the module's epsilon."""
    values = vars(module).values()
    return [v for v in values if isinstance(v, float) and 0 < v < 1e-2]


def _candidates(module: nn.Module) -> list[NormForm]:
    scaled = [(True, 0.0), (False, 0.0), (False, 1.0)]
    return [
        NormForm(eps, rounds_first, offset)
        for eps in _constants(module)
        for rounds_first, offset in scaled
    ]


def _agrees(
    form: NormForm, x: torch.Tensor, weight_H: torch.Tensor | None, want: torch.Tensor
) -> bool:
    got = reference(x, weight_H, form)
    return bool((got != want).float().mean(dim=(1, 2)).max() <= _MOST_UNEQUAL)


def _fused(stock: type[nn.Module], form: NormForm) -> type[nn.Module]:
    """The stock class with the fused forward."""

    def forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        weight_H = getattr(self, "weight", None)
        known = weight_H is None or weight_H.dtype == hidden_states.dtype
        if torch.compiler.is_compiling() or not known:
            return stock.forward(self, hidden_states)  # type: ignore[no-any-return]
        return rms_norm(hidden_states, weight_H, form)

    return type(f"Fused{stock.__name__}", (stock,), {"forward": forward})
