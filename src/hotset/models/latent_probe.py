"""Whether a stock layer expands its latents as ours are, shown with random numbers.

What is shown for one position holds for all, since the layer's matrix is applied to each. Knows one
layer's `expand_kv` and `kv_b_proj`; knows nothing of caches, masks or attention.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from hotset.core.geometry import AttentionLayer
from hotset.models.latents import by_head, expand

_NUM_TOKENS = 3
# Values of order 1, summed in FP32; another formula differs in the first digits.
_TOLERANCE = 1e-3


def expansion_problem(module: Any, layer: AttentionLayer) -> str:
    """Why our expansion cannot stand for a module's, as a clause; empty if it can.

    Args:
        module: an attention module with `expand_kv`, on any device.
        layer: what was found about it.
    """
    assert layer.latent is not None
    rank, rope_dim = layer.latent.rank, layer.latent.rope_dim
    matrix = getattr(module, "kv_b_proj", None)
    rows = layer.num_heads * (layer.key_dim - rope_dim + layer.value_dim)
    if type(matrix) is not nn.Linear or matrix.bias is not None:
        return "expands its latents by something else than one matrix"
    if tuple(matrix.weight.shape) != (rows, rank):
        shape = tuple(matrix.weight.shape)
        return f"expands its latents by a matrix of shape {shape}, not {(rows, rank)}"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, rank, generator=generator) * rank**-0.5
    twin = _with_matrix(module, weight)
    latents_PR = torch.randn(_NUM_TOKENS, rank, generator=generator)
    rope_PD = torch.randn(_NUM_TOKENS, rope_dim, generator=generator)
    with torch.no_grad():
        expected = type(module).expand_kv(twin, latents_PR[None, None], rope_PD[None, None])
        weight_QER = by_head(weight, layer.num_heads)
        ours = expand(latents_PR, rope_PD, weight_QER, value_dim=layer.value_dim)
    for got, want in zip(ours, expected, strict=True):
        if want[0].shape != got.shape or not torch.allclose(got, want[0], rtol=0, atol=_TOLERANCE):
            return "expands its latents in a way of its own"
    return ""


def _with_matrix(module: nn.Module, weight: torch.Tensor) -> nn.Module:
    """The module with another matrix, on the CPU in FP32."""
    rows, rank = weight.shape
    matrix = nn.Linear(rank, rows, bias=False, device="meta")
    matrix.weight = nn.Parameter(weight, requires_grad=False)
    twin = copy.copy(module)
    object.__setattr__(twin, "_modules", {**module._modules, "kv_b_proj": matrix})
    return twin
