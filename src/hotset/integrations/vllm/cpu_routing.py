"""Routing on a CPU in versions of vLLM whose routers are CUDA kernels only (0.26).

There its CPU experts are handed logits and route for themselves; so do hotset's, by vLLM's own
function. Later versions route on a CPU as elsewhere, and nothing of this runs.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"


def experts_route(device: torch.device) -> bool:
    """Whether this vLLM leaves routing to the experts on this device."""
    return device.type == "cpu" and find_spec(f"{_FUSED_MOE}.router.cpu_router") is None


def route(
    layer: Any, x_TH: torch.Tensor, logits_TE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of the experts, [T, K] each, as vLLM's CPU experts choose them.

    Args:
        layer: vLLM's layer of routed experts, which in these versions says how it routes.
    """
    # Other versions have no such module, so it is found by name.
    select_experts = import_module(f"{_FUSED_MOE}.cpu_fused_moe").select_experts
    weights_TK, ids_TK = select_experts(
        hidden_states=x_TH,
        router_logits=logits_TE,
        top_k=layer.top_k,
        use_grouped_topk=layer.use_grouped_topk,
        renormalize=layer.renormalize,
        topk_group=layer.topk_group,
        num_expert_group=layer.num_expert_group,
        custom_routing_function=layer.custom_routing_function,
        scoring_func=layer.scoring_func,
        routed_scaling_factor=layer.routed_scaling_factor,
        e_score_correction_bias=layer.e_score_correction_bias,
    )
    return weights_TK, ids_TK
