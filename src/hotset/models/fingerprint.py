"""Which model routing statistics belong to: its shape, and a hash of what decides the routing.

Knows module trees; nothing of traces or profiles.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator

import torch
from torch import nn

from hotset.core.fingerprint import ModelFingerprint
from hotset.core.geometry import ModelGeometry

logger = logging.getLogger(__name__)

# What every MoE block of transformers calls its router; a test holds it for all that are supported.
_ROUTERS = ("gate", "router")


def shape_fingerprint(geometry: ModelGeometry) -> ModelFingerprint:
    """What is known before a weight is read: everything but the hash."""
    return ModelFingerprint(
        architecture=geometry.model_type,
        num_experts=tuple(layer.num_experts for layer in geometry.layers),
        top_k=tuple(layer.top_k for layer in geometry.layers),
    )


def model_fingerprint(geometry: ModelGeometry, model: nn.Module) -> ModelFingerprint:
    """The fingerprint with the hash of all router weights.

    Args:
        model: with its resident weights; experts are not looked at.
    """
    shape = shape_fingerprint(geometry)
    digest = hashlib.sha256()
    for layer in geometry.layers:
        found = sorted(router_tensors(model, layer.name, layer.num_experts), key=lambda t: t[0])
        if not found:
            logger.warning(
                "no router weights found beside `%s`: a profile is tied to this model by its shape "
                "alone",
                layer.name,
            )
            return shape
        for name, tensor in found:
            digest.update(f"{name} {list(tensor.shape)} ".encode())
            # In BF16 whatever the model computes in, so that a choice of dtype does not matter.
            bits = tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16)
            digest.update(bits.cpu().numpy().tobytes())
    return ModelFingerprint(
        architecture=shape.architecture,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        router_hash=digest.hexdigest(),
    )


def router_tensors(
    model: nn.Module, experts: str, num_experts: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """What decides the routing of one MoE layer: all of its router, and biases that some models
    keep beside it.

    Args:
        experts: path of the experts module; the router is in the block around it.

    Yields:
        Names within the block, and the tensors.
    """
    block = model.get_submodule(experts.rpartition(".")[0])
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        is_router = name.partition(".")[0] in _ROUTERS
        is_bias = "." not in name and tuple(tensor.shape) == (num_experts,)
        if is_router or is_bias:
            yield name, tensor
