"""What a user would do instead: stock transformers, its weights offloaded to host memory.

The model has the shape of an engine's, cut to a few layers with random weights, so that it fits
beside the engine; times are scaled to all layers. Knows stock transformers and accelerate only.
"""

from __future__ import annotations

import copy

import torch
from accelerate import cpu_offload
from transformers import PreTrainedModel

from hotset.bench.timing import time_ms
from hotset.models.load import quiet_transformers
from hotset.models.seam import model_class
from hotset.runtime.engine import Engine


def time_offload(engine: Engine, num_tokens: int, *, num_layers: int, repeats: int) -> list[float]:
    """Milliseconds to the first token of a prompt, scaled to all layers of the engine's model.

    Args:
        engine: whose model's shape is taken; its weights are not.
        num_layers: layers that are really run.
    """
    model, device = _cut_model(engine.model, num_layers), engine.device
    cpu_offload(model, execution_device=device)
    ids = torch.randint(0, engine.geometry.vocab, (1, num_tokens), device=device)

    def prompt() -> None:
        # Its hooks change tensors in place, which inference tensors do not allow.
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=True, logits_to_keep=1).logits
        int(logits[0, -1].argmax())

    times = time_ms(prompt, device=device, repeats=repeats, warmup=1)
    scale = engine.geometry.num_layers / num_layers
    return [milliseconds * scale for milliseconds in times]


def _cut_model(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A stock model of the first layers' shape, random, in host memory."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    config._attn_implementation_internal = None
    with quiet_transformers():
        stock: PreTrainedModel = model_class(config)._from_config(
            config, dtype=model.dtype, experts_implementation="grouped_mm"
        )
    stock.eval()
    return stock
