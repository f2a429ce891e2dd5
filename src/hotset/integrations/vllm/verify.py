"""Whether a running model's experts are what they should be: `hotset verify`'s checks, inside vLLM.

Slots are compared with the arena byte for byte, the table with both; and each layer's output with
experts read from slots, from host memory, and through the staging ring, bit for bit. What vLLM
itself does from run to run is not looked at, and the files of the checkpoint by `audit`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hotset.core.placement import Placement
from hotset.integrations.vllm.model import ModelExperts
from hotset.runtime.moe import MATCH_TOKENS, MoERunner
from hotset.runtime.routing import RoutingLog

# One token and a few take other kernels than a prompt.
TOKENS = (1, 5, MATCH_TOKENS + 13)


def verify_experts(model: ModelExperts) -> list[str]:
    """One sentence for everything that is wrong; none when all is right.

    The placement is as it was behind it, and no policy has learnt anything.
    """
    model.end_step()
    with torch.inference_mode():
        return [*model.store.audit(), *_placements(model)]


def _placements(model: ModelExperts) -> Iterator[str]:
    """Compares outputs under the placement as it is with those of no slot at all."""
    store = model.store
    assert store.steps_in_flight == 0, "a step is queued"
    as_is = store.placement
    cases = [
        (layer, num_tokens, _inputs(model, layer, num_tokens))
        for layer in range(len(store.layers))
        for num_tokens in TOKENS
    ]
    with_slots = [_output(model, layer, inputs) for layer, _, inputs in cases]
    nobody = Placement(as_is.pools, num_spare=as_is.num_spare)
    try:
        store.place(nobody)
        without = [_output(model, layer, inputs) for layer, _, inputs in cases]
    finally:
        store.place(as_is)
    for (layer, num_tokens, _), left, right in zip(cases, with_slots, without, strict=True):
        if not torch.equal(left, right):
            name = store.layers[layer].name
            yield f"`{name}` gives other bits for {num_tokens} tokens when no expert has a slot"


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(model: ModelExperts, layer: int, num_tokens: int) -> Inputs:
    """Hidden states, ids and routing weights: the same for the same layer, every expert in turn."""
    spec = model.store.layers[layer]
    # Named, as vLLM changes the defaults of both while it loads a model.
    source, plain = torch.Generator("cpu").manual_seed(layer), torch.float32
    x_TH = torch.randn(num_tokens, spec.expert.hidden, generator=source, dtype=plain)
    weights_TK = torch.rand(num_tokens, spec.top_k, generator=source, dtype=plain)
    first = torch.arange(num_tokens)[:, None] * spec.top_k + torch.arange(spec.top_k)
    ids_TK = (first % spec.num_experts).to(torch.int32)
    dtype = getattr(torch, spec.expert.dtype)
    return x_TH.to(model.device, dtype), ids_TK.to(model.device), weights_TK.to(model.device)


def _output(model: ModelExperts, layer: int, inputs: Inputs) -> torch.Tensor:
    """By a runner of its own, which fills nothing and tells no policy."""
    log = RoutingLog(model.store.layers)
    runner = MoERunner(
        layer,
        None,
        store=model.store,
        kernels=model.kernels,
        log=log,
        stream=model.stream,
        staging=model.staging,
    )
    return runner(*inputs)
