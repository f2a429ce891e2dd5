"""Published model shapes, as configs: what a random model is built from. No weights, no network.

Figures are from the models' own config files; the fields that do not change a size or a speed keep
transformers' defaults.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from hotset.core.errors import ConfigError

_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
        },
    ),
    "qwen3.6-35b-a3b": (
        "qwen3_5_moe_text",
        {
            "num_hidden_layers": 40,
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "vocab_size": 248320,
            "max_position_embeddings": 262144,
        },
    ),
    # For tests and for trying a benchmark on a CPU: every part of the first one, tiny.
    "tiny": (
        "qwen3_moe",
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 256,
            "max_position_embeddings": 2048,
        },
    ),
}

NAMES = tuple(_SHAPES)


def shape_config(name: str, *, num_layers: int | None = None) -> PretrainedConfig:
    """The config of a published shape.

    Args:
        name: one of `NAMES`.
        num_layers: cut the depth to this many decoder layers.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in _SHAPES:
        raise ConfigError(f"unknown shape `{name}`", hint=f"one of {', '.join(NAMES)}")
    model_type, values = _SHAPES[name]
    if num_layers is not None:
        values = {**values, "num_hidden_layers": num_layers}
    fixed = {"tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": None}
    config: PretrainedConfig = AutoConfig.for_model(model_type, **fixed, **values)
    return config
