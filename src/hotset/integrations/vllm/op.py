"""The custom op that a layer's experts are to vLLM's compiler: opaque, with a fake.

What it does depends on routed data and changes hotset's tables, so nothing may look inside, and
no graph of vLLM's may record it (`graphs.leave_graphs`). It finds its model where vLLM keeps its
layers for custom ops, in the forward context, so that nothing is global.
"""

from __future__ import annotations

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from hotset.integrations.vllm.config import KEY
from hotset.integrations.vllm.model import ModelExperts
from hotset.integrations.vllm.padding import kept_ids

# An op lives as long as its library.
_LIBRARY = torch.library.Library("hotset", "FRAGMENT")


def _routed_experts(
    hidden_states: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int
) -> torch.Tensor:
    """[T, H] from [T, H], [T, K] and [T, K]; `layer` is its index among the MoE layers."""
    context = get_forward_context()
    model = context.no_compile_layers[KEY]
    assert isinstance(model, ModelExperts)
    return model.run(
        layer,
        hidden_states.contiguous(),
        # Read again behind the step, when a compiled graph has used their memory anew.
        kept_ids(ids, context),
        weights,
        # Between captured pieces. `HotsetRunner` copies the output then.
        is_repeated=context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE,
    )


def _fake(
    hidden_states: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int
) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


direct_register_custom_op("routed_experts", _routed_experts, [], _fake, target_lib=_LIBRARY)


def routed_experts(
    x_TH: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor, layer: int
) -> torch.Tensor:
    """The op, called: [T, H] in the dtype of `x_TH`."""
    out: torch.Tensor = torch.ops.hotset.routed_experts(x_TH, weights_TK, ids_TK, layer)
    return out
