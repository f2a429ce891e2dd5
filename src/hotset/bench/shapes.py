"""Published model shapes, as configs: what a plan or a random model is made from. No weights, no
network.

Figures are from the models' own config files (`data/shapes.json`); fields that do not change a size
or a speed keep transformers' defaults.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from hotset.core.errors import ConfigError

_FILE = Path(__file__).parents[1] / "data" / "shapes.json"


def shape_names() -> tuple[str, ...]:
    """Every shape, in the order of the file."""
    return tuple(_shapes())


def shape_config(
    name: str, *, num_layers: int | None = None, context_tokens: int = 0
) -> PretrainedConfig:
    """The config of a published shape.

    Args:
        name: one of `shape_names`.
        num_layers: cut the depth to this many decoder layers.
        context_tokens: let it have positions for so many tokens, if it was made for fewer: to
            random weights they are all alike.

    Raises:
        ConfigError: an unknown name.
    """
    shapes = _shapes()
    if name not in shapes:
        close = get_close_matches(name, shapes, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"one of {', '.join(shapes)}"
        raise ConfigError(f"unknown shape `{name}`", hint=hint)
    model_type, values = shapes[name]["model_type"], shapes[name]["config"]
    if num_layers is not None:
        values = {**values, "num_hidden_layers": num_layers}
    fixed = {"tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": None}
    config: PretrainedConfig = AutoConfig.for_model(model_type, **{**fixed, **values})
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and longest < context_tokens:
        text.max_position_embeddings = context_tokens
    return config


def _shapes() -> dict[str, dict[str, Any]]:
    """Name to `model_type`, `config` and, where a figure is assumed, a `note`."""
    shapes: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return shapes
