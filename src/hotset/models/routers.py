"""Routers by softmax choose and weigh a prompt's experts in one launch (`kernels/topk`).

Stock code takes six launches for it, of which the library's top-k alone reads rows of a hundred
numbers for longer than a matrix product over the tokens. Which modules are such routers, and in
which form, is asked of a small copy of each kind, so that no class is listed. Among equal scores
the lowest id goes first, as in compiled decode steps (`models/rewrites`). Where a compiler looks
at a model, it sees the stock code. Knows modules; nothing of where they stand in a model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from hotset.kernels.topk import accepts, launch_topk, softmax_topk_reference
from hotset.models.kinds import by_form, refit

_PROBE_TOKENS = 16


@dataclass(frozen=True)
class RouterForm:
    """How a router weighs what it chooses by the softmax of its logits.

    Attributes:
        top_k: K.
        normalise: weights are divided by their sum.
        wide: weights stay in FP32; otherwise they are rounded to the dtype of the logits.
    """

    top_k: int
    normalise: bool
    wide: bool

    def dtype(self, logits: torch.Tensor) -> torch.dtype:
        return torch.float32 if self.wide else logits.dtype


def fuse_routers(model: nn.Module) -> int:
    """Gives each router of a model on a GPU its fused form.

    Args:
        model: a stock model with its weights.

    Returns:
        How many there are.
    """
    return refit(model, by_form(find_form, _fused))


def find_form(module: nn.Module) -> RouterForm | None:
    """The form of a router, shown with weights whose logits are known to differ; `None` where no
    form gives what the module does."""
    if not _may_be_router(module):
        return None
    num_experts, hidden = module.get_parameter("weight").shape
    twin = copy.deepcopy(module).cpu()
    source = torch.Generator().manual_seed(0)
    levels_N = _levels(twin.get_parameter("weight").dtype)
    if num_experts > len(levels_N) or hidden < _PROBE_TOKENS:
        return None
    # Token t takes column t. No two logits of it are equal, so the choice is one.
    x_TH = torch.eye(_PROBE_TOKENS, hidden, dtype=levels_N.dtype)
    with torch.no_grad():
        weight_EH = twin.get_parameter("weight").zero_()
        for column in range(_PROBE_TOKENS):
            some_E = torch.randperm(len(levels_N), generator=source)[:num_experts]
            weight_EH[:, column] = levels_N[some_E]
        try:
            out = twin(x_TH)
        except (RuntimeError, ValueError):  # it takes tokens in another shape
            return None
        logits_TE = functional.linear(x_TH, weight_EH)
    return next((form for form in _candidates(module) if _agrees(form, logits_TE, out)), None)


def _may_be_router(module: nn.Module) -> bool:
    """One tensor comes in; a row of weights for each expert, and nothing else that it could compute
    with."""
    if module._modules or module._buffers or not _counts(module):
        return False
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    parameters = dict(module.named_parameters())
    weight = parameters.pop("weight", None)
    return not parameters and weight is not None and weight.dim() == 2


def _levels(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a dtype between 1/2 and 8, of both signs; no two are equal in BF16."""
    steps = torch.arange(128) / 128 + 1
    magnitudes = torch.cat([steps * 2.0**e for e in range(-1, 3)])
    return torch.cat((magnitudes, -magnitudes)).to(dtype)


def _counts(module: nn.Module) -> list[int]:
    """Numbers that may be the module's K."""
    weight = module._parameters.get("weight")
    if weight is None:
        return []
    whole = {v for v in vars(module).values() if isinstance(v, int) and not isinstance(v, bool)}
    return sorted(k for k in whole if accepts(weight.shape[0], k, weight.dtype))


def _candidates(module: nn.Module) -> Iterator[RouterForm]:
    for top_k in _counts(module):
        for normalise in (True, False):
            for wide in (True, False):
                yield RouterForm(top_k, normalise, wide)


def _agrees(form: RouterForm, logits_TE: torch.Tensor, out: object) -> bool:
    """Bit by bit: on a CPU both are the same operations."""
    if not isinstance(out, tuple) or len(out) != 3:
        return False
    want = softmax_topk_reference(
        logits_TE, form.top_k, normalise=form.normalise, dtype=form.dtype(logits_TE)
    )
    return all(
        isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(out, (logits_TE, *want), strict=True)
    )


def _fused(stock: type[nn.Module], form: RouterForm) -> type[nn.Module]:
    """The stock class with the fused forward."""

    def forward(
        self: nn.Module, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight_EH = self.get_parameter("weight")
        if torch.compiler.is_compiling() or weight_EH.dtype != hidden_states.dtype:
            return stock.forward(self, hidden_states)  # type: ignore[no-any-return]
        x_TH = hidden_states.reshape(-1, weight_EH.shape[1])
        logits_TE = functional.linear(x_TH, weight_EH)
        weights_TK, ids_TK = launch_topk(
            logits_TE,
            form.top_k,
            softmax=True,
            normalise=form.normalise,
            dtype=form.dtype(logits_TE),
        )
        return logits_TE, weights_TK, ids_TK

    return type(f"Fused{stock.__name__}", (stock,), {"forward": forward})
