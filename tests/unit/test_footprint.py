"""What a sequence takes, as measured on the meta device, against real caches and real forwards.

The real model runs on the CPU with the same stock code and attention as one kernel, as on a GPU.
Its experts are left out of both, because their workspace is charged elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hotset.core.geometry import ModelGeometry
from hotset.models import footprint
from hotset.models.geometry import build_meta
from hotset.models.layer_kinds import LayerKinds
from hotset.models.seam import (
    bind_experts,
    class_config,
    experts_modules,
    hotset_class,
    model_class,
)
from tiny import VOCAB, tiny_config

# Grouped heads, latents, latents with an indexer, sliding windows beside full attention, linear
# attention, state spaces, convolutions, linear attention with a cache class of its own.
TYPES = (
    *("qwen3_moe", "deepseek_v3", "deepseek_v32", "gpt_oss", "qwen3_next", "granitemoehybrid"),
    *("lfm2_moe", "minimax"),
)
# Its compressors keep what does not fill a period, so that its cache grows in steps.
STEPWISE = "deepseek_v4"

# (new tokens, context with them): whole periods of every recurrence.
FORWARDS = ((256, 256), (128, 384), (256, 640), (1, 641), (1, 642))


@cache
def geometry(model_type: str) -> ModelGeometry:
    """In the library's cache, with the library's masks. Over a pool neither grows with pairs of
    tokens; `test_a_pool_needs_no_masks` has that."""
    meta = build_meta(tiny_config(model_type), "float32")
    used = footprint.measure(meta.model, VOCAB)
    return replace(
        meta.geometry,
        activation_bytes_per_context_token=used.activation_bytes_per_context_token,
        activation_bytes_per_pair=used.activation_bytes_per_pair,
    )


def real_model(model_type: str) -> Any:
    """On the CPU, without experts, weights as the library initialises them."""
    config = tiny_config(model_type)
    stock = model_class(config)
    model = hotset_class(stock)._from_config(
        class_config(stock, config), dtype=torch.float32, experts_implementation="hotset"
    )
    for module in experts_modules(model).values():
        bind_experts(module, lambda hidden_TH, ids_TK, weights_TK: torch.empty_like(hidden_TH))
    return model.eval()


class OneKernelAttention(TorchFunctionMode):
    """As on a GPU: no scores; a mask of booleans becomes one of floats, and once more aligned."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, _, value = args[:3]
        mask = kwargs.get("attn_mask")
        copies = query.new_empty((2, *mask.shape)) if mask is not None else None
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        del copies
        return out


@cache
def real_forwards(model_type: str) -> tuple[tuple[int, int], ...]:
    """Bytes of the whole cache, and most bytes born in the forward, after each of `FORWARDS`."""
    return tuple(_run(real_model(model_type)))


def _run(model: Any) -> Iterator[tuple[int, int]]:
    kept = None
    for num_tokens, _ in FORWARDS:
        ids = torch.zeros((1, num_tokens), dtype=torch.int64)
        with torch.no_grad(), OneKernelAttention(), footprint.PeakBytes() as peak:
            out = model(input_ids=ids, past_key_values=kept, use_cache=True, logits_to_keep=1)
            kept = out.past_key_values
            del out
        yield cache_bytes(kept), peak.peak


def cache_bytes(kept: Any) -> int:
    """Bytes of all storages that a cache holds on to, found without hotset's help."""
    seen: dict[int, int] = {}
    todo = [kept]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif hasattr(value, "__dict__") and "cache_utils" in _modules(value):
            todo.append(vars(value))
    return sum(seen.values())


def _modules(value: Any) -> str:
    return " ".join(base.__module__ for base in type(value).__mro__)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_real_cache_takes_what_was_foreseen(model_type: str) -> None:
    """To the byte while decoding; a window holds on to the last chunk besides, which is charged to
    the chunk."""
    spec = geometry(model_type)
    for (num_tokens, context), (real, _) in zip(FORWARDS, real_forwards(model_type), strict=True):
        foreseen = spec.kv_fixed_bytes + spec.kv_bytes_per_token * context
        if num_tokens == 1:
            assert real == foreseen
        else:
            assert foreseen <= real <= foreseen + spec.activation_bytes_per_token * num_tokens
            assert real == foreseen or model_type == "gpt_oss"


def test_a_cache_that_grows_in_steps_is_bounded() -> None:
    spec = geometry(STEPWISE)
    for (num_tokens, context), (real, _) in zip(FORWARDS, real_forwards(STEPWISE), strict=True):
        foreseen = spec.kv_fixed_bytes + spec.kv_bytes_per_token * context
        assert real <= foreseen + spec.activation_bytes_per_token * num_tokens


def test_formulas_of_the_papers() -> None:
    """4 layers, float32: 2 heads of 8 for keys and values; latents of 16 and 8 rotary; a window
    of 16 in half of the layers, of which the last 15 are kept and the new one, and a counter."""
    assert geometry("qwen3_moe").kv_bytes_per_token == 4 * 2 * 2 * 8 * 4
    assert geometry("qwen3_moe").kv_fixed_bytes == 0
    assert geometry("deepseek_v3").kv_bytes_per_token == 4 * (16 + 8) * 4
    windowed = geometry("gpt_oss")
    per_layer = 2 * 2 * 8 * 4
    assert windowed.kv_bytes_per_token == 2 * per_layer
    assert windowed.kv_fixed_bytes == 2 * (16 * per_layer + 8)


@pytest.mark.parametrize("model_type", [*TYPES, STEPWISE])
def test_activations_stay_within_what_was_foreseen(model_type: str) -> None:
    """Beside the new cache, which is born in the forward too. No tolerance: it is a bound."""
    spec = geometry(model_type)
    for (num_tokens, context), (_, peak) in zip(FORWARDS, real_forwards(model_type), strict=True):
        new_cache = spec.kv_fixed_bytes + spec.kv_bytes_per_token * context
        assert peak <= spec.activation_bytes(num_tokens, context) + new_cache


# minimax loops over its tokens here.
@pytest.mark.parametrize("model_type", [name for name in TYPES if name != "minimax"])
def test_the_bound_holds_far_from_where_it_was_measured(model_type: str) -> None:
    """2,048 new tokens at contexts of 2,048 to 8,192 on the meta device, and it is no idle bound:
    at the longest it is within a factor of 3 of the peak."""
    meta = build_meta(tiny_config(model_type), "float32")
    layers, kept = LayerKinds(meta.model), None
    for context in range(2048, 8193, 2048):
        with layers.only(layers.first_of_each):
            kept, peak = footprint._forward(meta.model, VOCAB, 2048, kept)
        foreseen = geometry(model_type).activation_bytes(2048, context)
        assert peak <= foreseen, (context, peak / foreseen)
    assert foreseen < 3 * peak


@pytest.mark.parametrize("model_type", TYPES)
def test_a_pool_needs_no_masks(model_type: str) -> None:
    """What is charged over a pool is no more than in the library's cache, and nothing of it grows
    with the square of the prompt."""
    pooled = build_meta(tiny_config(model_type), "float32").geometry
    in_library = geometry(model_type)
    if pooled.attention_reason:
        assert pooled == in_library
    else:
        assert pooled.activation_bytes_per_pair == 0
        assert pooled.activation_bytes(2048, 8192) < in_library.activation_bytes(2048, 8192)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "granitemoe", "minimax"])
def test_resident_bytes_are_those_of_the_module_tree(model_type: str) -> None:
    model = real_model(model_type)
    tensors = [*model.parameters(), *model.buffers()]
    assert geometry(model_type).resident_bytes == sum(t.nbytes for t in tensors)


def test_a_left_out_layer_hands_on_what_it_is_given() -> None:
    """Layers of one kind stand for all: with all of them left out but one, that one still gets the
    mask of its own place."""
    meta = build_meta(tiny_config("gpt_oss"), "float32")
    layers = LayerKinds(meta.model)
    assert layers.kind == [0, 1, 0, 1]
    for module in experts_modules(meta.model).values():
        bind_experts(module, lambda hidden_TH, ids_TK, weights_TK: torch.empty_like(hidden_TH))
    with layers.only([0, 1, 3]):
        kept, _ = footprint._forward(meta.model, VOCAB, 40, None)
    assert [kept.get_seq_length(index) for index in (0, 1, 3)] == [40, 40, 40]
    assert not kept.layers[2].is_initialized
    with layers.only(range(4)):
        footprint._forward(meta.model, VOCAB, 40, None)
    assert all("forward" not in vars(layer) for layer in layers._layers), "all is as it was"
