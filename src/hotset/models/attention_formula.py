"""Whether a stock attention function computes what ours does, shown with random numbers.

A model names its attention function in its config, and may bring one of its own for `eager`, with
sinks, caps or anything else in it. It is called as the model calls it, with one query token. Knows
functions and their arguments; knows nothing of layers, caches or masks.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hotset.kernels import attention_reference

# What our attention function takes beside the tensors and positions.
FORMULA_ARGUMENTS = frozenset({"scaling", "softcap", "s_aux"})

# Standard deviation of the scores. A cap on them shows in large ones, an attention sink in small.
_SCORES = (8.0, 1.0)
# FP32 errors stay below 1e-4 with such scores; another formula differs in the first digits.
_TOLERANCE = 1e-3


def formula_problem(
    module: nn.Module,
    arguments: Mapping[str, Any],
    *,
    num_heads: tuple[int, int],
    head_dims: tuple[int, int],
    num_keys: int,
) -> str:
    """Why our attention function cannot stand for a module's, as a clause; empty if it can.

    Args:
        module: an attention module, on any device.
        arguments: what it passes to its attention function by name.
        num_heads: of queries, and of keys and values.
        head_dims: of queries and keys, and of values.
        num_keys: tokens to attend to.
    """
    scale = arguments.get("scaling")
    if not isinstance(scale, float | int | None):
        return "scales its scores by a tensor"
    stock = _stock_function(module)
    if stock is None:
        return "has no attention function that could be compared"
    generator = torch.Generator().manual_seed(0)
    twin = _twin(module, generator)
    own = _with_parameters_of(twin, module, arguments)
    scale = head_dims[0] ** -0.5 if scale is None else scale
    for size in _SCORES:
        q = torch.randn(1, num_heads[0], 1, head_dims[0], generator=generator)
        k = torch.randn(1, num_heads[1], num_keys, head_dims[0], generator=generator)
        v = torch.randn(1, num_heads[1], num_keys, head_dims[1], generator=generator)
        q *= size / (scale * head_dims[0] ** 0.5)
        with torch.no_grad():
            expected = stock(twin, q, k, v, None, **own)[0][0, 0]
            ours = attention_reference.attend(
                q[0, :, 0],
                k[0].transpose(0, 1),
                v[0].transpose(0, 1),
                scale=scale,
                softcap=own.get("softcap"),
                sinks_Q=own.get("s_aux"),
            )
        if not torch.allclose(ours, expected, rtol=0, atol=_TOLERANCE):
            return "has an attention formula of its own"
    return ""


def _stock_function(module: Any) -> Any:
    """What the module calls now; `eager` is a function of the file that its class is in."""
    name = module.config._attn_implementation
    if name == "eager":
        return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS[name]


def _twin(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """The module with random numbers on the CPU as its own parameters (sinks, say)."""
    twin = copy.copy(module)
    own = {
        name: nn.Parameter(torch.randn(parameter.shape, generator=generator))
        for name, parameter in module.named_parameters(recurse=False)
    }
    object.__setattr__(twin, "_parameters", {**module._parameters, **own})
    return twin


def _with_parameters_of(
    twin: nn.Module, module: nn.Module, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that matter, the module's parameters among them replaced by its twin's."""
    replaced = {
        id(parameter): twin.get_parameter(name)
        for name, parameter in module.named_parameters(recurse=False)
    }
    used = FORMULA_ARGUMENTS | {"sliding_window"}
    return {n: replaced.get(id(v), v) for n, v in arguments.items() if n in used}
