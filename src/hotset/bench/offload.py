"""What a user would do instead: stock transformers, its weights offloaded to host memory.

The model has the shape of an engine's, cut to a few layers with random weights, so that it fits
beside the engine; times are scaled to all layers. Knows stock transformers and accelerate only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import cpu_offload
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from hotset.bench.timing import time_ms
from hotset.models.load import quiet_transformers
from hotset.models.seam import model_class
from hotset.runtime.engine import Engine

_STD = 0.02


class OffloadedPrompts:
    """A stock model that brings each weight from host memory when it runs.

    Args:
        engine: whose model's shape is taken; its weights are not.
        num_layers: layers that are really run.
    """

    def __init__(self, engine: Engine, *, num_layers: int) -> None:
        self._device, self._vocab = engine.device, engine.geometry.vocab
        self._scale = engine.geometry.num_layers / num_layers
        self._model = _cut_model(engine.model, num_layers, device=engine.device)
        cpu_offload(self._model, execution_device=engine.device)

    def times(self, num_tokens: int, *, repeats: int) -> list[float]:
        """Milliseconds to the first token of a prompt, scaled to all layers of the engine's
        model."""
        ids = torch.randint(0, self._vocab, (1, num_tokens), device=self._device)

        def prompt() -> None:
            # Its hooks change tensors in place, which inference tensors do not allow.
            with torch.no_grad():
                logits = self._model(input_ids=ids, use_cache=True, logits_to_keep=1).logits
            int(logits[0, -1].argmax())

        times = time_ms(prompt, device=self._device, repeats=repeats, warmup=1)
        return [milliseconds * self._scale for milliseconds in times]


@dataclass(frozen=True)
class OffloadedDecode:
    """Milliseconds of one decode step of a stock model, all layers.

    Attributes:
        resident_ms: every layer on the device.
        offloaded_ms: every layer's weights brought from host memory when it runs.
    """

    resident_ms: float
    offloaded_ms: float

    def at(self, share: float) -> float:
        """With that share of the layers on the device; layers run one after the other."""
        return share * self.resident_ms + (1 - share) * self.offloaded_ms


def time_offloaded_decode(
    engine: Engine, batches: Sequence[int], *, context_tokens: int, num_layers: int, repeats: int
) -> dict[int, OffloadedDecode]:
    """Times of each batch size. Embeddings and head are on the device in both cases, and are not
    scaled.

    Args:
        engine: whose model's shape is taken; its weights are not.
        context_tokens: in the cache of each row.
        num_layers: layers that are really run; what they take is scaled to all of the model's.
    """
    device = engine.device
    model = _cut_model(engine.model, num_layers, device=device)
    scale = engine.geometry.num_layers / num_layers
    decoder = model.get_decoder()
    layers = decoder.layers

    def times() -> list[float]:
        return [_decode_ms(model, device, size, context_tokens, repeats) for size in batches]

    nn.Module.to(model, device)  # transformers' own is typed as if it took no device
    resident = times()
    decoder.layers = nn.ModuleList()
    fixed = times()
    decoder.layers = layers.to("cpu")
    for layer in layers:
        cpu_offload(layer, execution_device=device)
    found = {}
    for size, on, off, rest in zip(batches, resident, times(), fixed, strict=True):
        found[size] = OffloadedDecode(rest + (on - rest) * scale, rest + (off - rest) * scale)
    return found


def _decode_ms(
    model: PreTrainedModel, device: torch.device, num_rows: int, context_tokens: int, repeats: int
) -> float:
    """Median of steps of one token for each row."""
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocab, (num_rows, context_tokens), device=device)
    with torch.no_grad():  # see above
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

        def step() -> None:
            out = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
            out.logits[:, -1].argmax(dim=-1).cpu()

        times = time_ms(step, device=device, repeats=repeats, warmup=1)
    return sorted(times)[len(times) // 2]


def _cut_model(model: PreTrainedModel, num_layers: int, *, device: torch.device) -> PreTrainedModel:
    """A stock model of the first layers' shape in host memory, random, drawn on the device: a
    processor takes minutes for some billion numbers."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    config._attn_implementation_internal = None
    with quiet_transformers(), no_init_weights():
        stock: PreTrainedModel = model_class(config)._from_config(
            config, dtype=model.dtype, experts_implementation="grouped_mm"
        )
    with torch.no_grad():
        for weight in stock.parameters():
            weight.copy_(torch.randn(weight.shape, dtype=weight.dtype, device=device) * _STD)
    stock.eval()
    return stock
