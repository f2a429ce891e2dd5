"""Which architectures can run over the KV pool, and that it is what they do that decides it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from hotset.core.geometry import AttentionLayer, StateTensor
from hotset.models.attention_probe import find_attention
from hotset.models.geometry import build_meta
from own_cache import OWN_CACHE
from tiny import TINY_MODEL_TYPES, build_tiny, tiny_config

REFUSED = {name: why.reason for why in OWN_CACHE for name in why.model_types}
# Layers that carry a state, and those that keep keys and values.
STATES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), ({0, 2}, {1, 3})),
    **dict.fromkeys(("granitemoehybrid", "lfm2_moe"), ({0, 2}, {1, 3})),
    **dict.fromkeys(("bailing_hybrid", "glm5_next", "kimi_linear"), ({0, 2}, {1, 3})),
    "nemotron_h": ({0}, {2}),
    "jamba": ({0, 1, 2, 3, 5, 6, 7}, {4}),
    "zaya": ({0, 1, 2, 3}, {0, 1, 2, 3}),
}
WINDOWED = {
    *("afmoe", "beam", "cohere2_moe", "exaone_moe", "flint", "gpt_oss", "granitemoe_swa"),
    *("gemma4", "kolibri1", "mimo_v2_flash", "muse_spark"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", TINY_MODEL_TYPES)
def test_every_architecture(model_type: str) -> None:
    found = find_attention(build_tiny(model_type))
    if model_type in REFUSED:
        assert REFUSED[model_type] in found.reason and not found.layers and not found.states
    else:
        assert found.ok, found.reason
        states, layers = STATES.get(model_type, (set(), {layer.index for layer in found.layers}))
        assert {state.index for state in found.states} == states
        assert {layer.index for layer in found.layers} == layers
        assert {layer.window for layer in found.layers} == (
            {16, None} if model_type in WINDOWED else {None}
        )


def test_numbers_of_the_layers_on_the_meta_device() -> None:
    found = find_attention(build_meta(tiny_config("mimo_v2_flash")).model)
    full, window = found.layers[:2]
    assert full == AttentionLayer(
        path="model.layers.0.self_attn",
        index=0,
        num_heads=4,
        num_kv_heads=2,
        key_dim=8,
        value_dim=8,
        window=None,
    )
    assert (window.index, window.num_kv_heads, window.window) == (1, 4, 16)
    assert [layer.index for layer in found.layers] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("qwen3_moe", {"rope_type": "dynamic", "factor": 2.0}),
        ("phimoe", {"rope_type": "longrope", "short_mscale": 1.0, "long_mscale": 1.0}),
    ],
)
def test_positions_that_ask_for_the_length_are_not_captured(
    model_type: str, rope: dict[str, Any]
) -> None:
    """Phi-3.5-MoE as published, say: it chooses its frequencies on the host, in every forward."""
    config = tiny_config(model_type)
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config.rope_parameters = {**factors, "rope_theta": 1e4, **rope}
    config.rope_parameters["original_max_position_embeddings"] = 64
    geometry = build_meta(config, "float32").geometry
    assert geometry.attention == ()
    assert geometry.attention_reason == "the model asks for values when it decodes (`__bool__`)"


def test_states_are_found_by_what_the_model_caches() -> None:
    """Shapes of one sequence; a state in the float format that the model keeps it in."""
    geometry = build_meta(tiny_config("qwen3_next"), "bfloat16").geometry
    first = geometry.states[0]
    assert (first.path, first.index) == ("model.layers.0.linear_attn", 0)
    assert first.tensors == (
        StateTensor(kind="conv", number=0, shape=(64, 4), dtype="bfloat16"),
        StateTensor(kind="recurrent", number=0, shape=(4, 8, 8), dtype="float32"),
    )


def test_a_state_that_grows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build_tiny("lfm2_moe")
    stock = LinearAttentionLayer.update_conv_state

    def whole(self: Any, conv_states: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(self, conv_states, *args, **{**kwargs, "conv_kernel_size": None})

    monkeypatch.setattr(LinearAttentionLayer, "update_conv_state", whole)
    reason = find_attention(model).reason
    assert reason == "layer 0 carries a state whose size depends on the text"


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_next"])
def test_the_model_is_left_as_it_was(model_type: str) -> None:
    model, ids = build_tiny(model_type), torch.arange(20)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert find_attention(model).ok
        assert torch.equal(model(input_ids=ids).logits, before)


def _attention(model: Any) -> Any:
    return model.model.layers[2].self_attn


def _another_argument(model: Any, patch: pytest.MonkeyPatch) -> None:
    _attention(model).forward = partial(_attention(model).forward, strange=1.0)


def _looks_at_the_keys(model: Any, patch: pytest.MonkeyPatch) -> None:
    forward = _attention(model).forward

    def looking(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs["past_key_values"]
        update = cache.update

        def scaled(*new: Any) -> Any:
            keys, values = update(*new)
            return keys, values * 1.0

        cache.update = scaled
        out = forward(*args, **kwargs)
        del cache.update
        return out

    _attention(model).forward = looking


def _asks_for_the_length(model: Any, patch: pytest.MonkeyPatch) -> None:
    forward = _attention(model).forward

    def asking(*args: Any, **kwargs: Any) -> Any:
        kwargs["past_key_values"].get_seq_length()
        return forward(*args, **kwargs)

    _attention(model).forward = asking


def _attends_in_chunks(model: Any, patch: pytest.MonkeyPatch) -> None:
    def same_chunk(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query // 3 == key // 3

    stock = modeling_qwen3_moe.create_causal_mask
    chunked = partial(stock, and_mask_function=same_chunk)
    patch.setattr(modeling_qwen3_moe, "create_causal_mask", chunked)


def _scales_by_a_tensor(model: Any, patch: pytest.MonkeyPatch) -> None:
    _attention(model).scaling = torch.tensor(0.3)


def _changes_the_mask(model: Any, patch: pytest.MonkeyPatch) -> None:
    forward = _attention(model).forward

    def changing(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        mask = None if attention_mask is None else attention_mask.clone()
        return forward(*args, attention_mask=mask, **kwargs)

    _attention(model).forward = changing


def _caches_twice(model: Any, patch: pytest.MonkeyPatch) -> None:
    _attention(model).layer_idx = 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_another_argument, "layer 2 passes `strange` to its attention function"),
        (_looks_at_the_keys, "layer 2 computes with what it caches before it attends (`mul`)"),
        (_asks_for_the_length, "asks its cache for one length of all rows"),
        (_attends_in_chunks, "layer 0 has a mask that is neither causal nor a window"),
        (_scales_by_a_tensor, "layer 2 scales its scores by a tensor"),
        (_changes_the_mask, "layer 2 changes its mask"),
        (_caches_twice, "layer 1 updates its cache 2 times in a forward"),
    ],
)
def test_what_a_model_does_decides(
    change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny("qwen3_moe")
    assert find_attention(model).ok
    change(model, monkeypatch)
    assert reason in find_attention(model).reason


def test_another_formula_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks that are passed and not used; scores that are capped without saying so."""
    model = build_tiny("gpt_oss")
    stock = modeling_gpt_oss.eager_attention_forward

    def capped(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(module, query.clamp(-5, 5), *args, **kwargs)

    def without_sinks(module: Any, *args: Any, **kwargs: Any) -> Any:
        return modeling_qwen3_moe.eager_attention_forward(module, *args, **kwargs)

    for changed in (capped, without_sinks):
        monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", changed)
        assert find_attention(model).reason == "layer 0 has an attention formula of its own"
