"""Tiny models of every supported architecture, with random weights: configurations and checkpoints.

Knows which configuration fields shrink a model and what a few architectures insist on. Knows
nothing about hotset: the models are stock transformers', saved by stock `save_pretrained`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 128
NUM_LAYERS = 4

# Composite types hold a text model and towers; only the text model is ever run.
COMPOSITE_MODEL_TYPES = (
    *("aria", "gemma4", "glm4v_moe", "glm5_next", "kimi_k25", "minimax_m3_vl", "mistral_large4"),
    *("muse_spark", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl_moe"),
)

TINY_MODEL_TYPES = (
    *("afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "ernie4_5_moe"),
    "exaone_moe",
    *("flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe"),
    *("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4"),
    *("inkling_text", "inkling2_text", "jamba", "kimi_linear", "kolibri1", "laguna", "lfm2_moe"),
    *("mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mistral4"),
    "mixtral",
    *("nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
    *("solar_open", "zaya"),
    *COMPOSITE_MODEL_TYPES,
)

# Applied wherever a text configuration has the field and does not leave it `None`.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 512,
    "intermediate_size": 48,
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "swa_v_head_dim": 8,
    "rel_extent": 64,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    # linear attention and state spaces
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "n_groups": 1,
    "ssm_state_size": 8,
    # experts and routers
    "moe_intermediate_size": 16,
    "moe_hidden_size": 24,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "moe_shared_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "router_hidden_size": 16,
    # token ids must lie inside the vocabulary
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

# Lists with one entry a layer: the kinds that occur, in turn, so that each is met.
_PER_LAYER = ("layer_types", "mlp_layer_types", "attention_layer_types", "indexer_types")

_OVERRIDES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    # experts beside the dense part are an option; layers differ in their heads by default
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "per_layer_config": {},
    },
    # sections of the rotary part by axis: half of the head's 8
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "mrope_section": [1, 1, 2],
        }
    },
    # its attention layers take no rotary part
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_kpool": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_moe": {"head_dim": 8},
    # padding ids are cut off the logits
    "inkling2_text": {"unpadded_vocab_size": VOCAB},
    # one attention layer in eight, at offset 4
    "jamba": {"num_hidden_layers": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mistral4": {
        "qk_head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 512,
        },
    },
    "nemotron_h": {
        "layer_types": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
    },
    "zaya": {"num_experts_per_tok": 1},
}

_VISION_SIZES: dict[str, Any] = {
    "depth": 1,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "patch_sizes": [16],
    "hidden_sizes": [32],
    "depths": [1],
    "hidden_size": 32,
    "intermediate_size": 32,
    "projection_intermediate_size": 32,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def _shrunk(config: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sizes.items() if getattr(config, name, None) is not None}


def _tiny_text_config(base: Any) -> Any:
    """A configuration of the same class as `base`, made tiny."""
    base.allow_global_per_layer_attribute_access = True  # sizes may differ by layer
    fields = _shrunk(base, _SIZES)
    fields |= {name: _SIZES[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    # latent attention expands its keys and values to all heads
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for name in _PER_LAYER:
        kinds = getattr(base, name, None)
        is_derived = isinstance(getattr(type(base), name, None), property)
        if isinstance(kinds, list) and kinds and not is_derived:
            distinct = list(dict.fromkeys(kinds))
            fields[name] = (distinct * NUM_LAYERS)[:NUM_LAYERS]
    fields |= _OVERRIDES.get(base.model_type, {})
    return type(base)(**fields)


def _tiny_tower(base: Any) -> Any:
    return type(base)(**_shrunk(base, _VISION_SIZES))


def tiny_config(model_type: str) -> Any:
    """The configuration of a tiny model of that type; a composite one for a composite type."""
    base = AutoConfig.for_model(model_type)
    if model_type not in COMPOSITE_MODEL_TYPES:
        return _tiny_text_config(base)
    towers = {
        name: _tiny_tower(getattr(base, name) or tower())
        for name, tower in base.sub_configs.items()
        # a tower that a type has by default, or sees with
        if getattr(base, name) is not None or name == "vision_config"
        if name != "text_config"
    }
    text = _tiny_text_config(base.text_config)
    projector = _shrunk(base, {"out_hidden_size": 32, "projector_hidden_size": 32})
    return type(base)(text_config=text, **towers, **projector, tie_word_embeddings=False)


def auto_class(config: Any) -> Any:
    """The class that a causal language model of this configuration is made with."""
    is_causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def build_tiny(
    model_type: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    with_towers: bool = False,
    config: Any = None,
) -> Any:
    """A stock model with `eager` experts, in evaluation mode.

    Matrices and biases (of routers, which are buffers, too) are drawn from normal(0, 0.12), so that
    outputs are not near-constant as they are with the library's own initialisation. Other buffers
    are constants of the architecture (decay rates of linear attention) and stay.

    Args:
        with_towers: build a composite type whole, as its checkpoints are.
        config: instead of `tiny_config(model_type)`.
    """
    config = config or tiny_config(model_type)
    auto = AutoModelForImageTextToText if with_towers else auto_class(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=dtype, experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    buffers = {name for name, _ in model.named_buffers()}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            is_matrix = tensor.dim() >= 2 and name not in buffers
            if tensor.is_floating_point() and (is_matrix or "bias" in name):
                noise = torch.randn(tensor.shape, generator=generator) * 0.12
                tensor.copy_(noise)
    return model


def save_tiny(
    model_type: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: int | str = "64KB",
    config: Any = None,
) -> Any:
    """Saves a tiny checkpoint to `folder` and returns the stock model that it was made from.

    Composite types are saved whole, with their towers, as they are published.
    """
    model = build_tiny(
        model_type,
        dtype=dtype,
        seed=seed,
        with_towers=model_type in COMPOSITE_MODEL_TYPES,
        config=config,
    )
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
