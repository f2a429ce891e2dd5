"""The same model with its BF16 experts in about 12 bits a weight, every bit kept.

Knows layers and formats; whether the weights really fit is found out while they are loaded
(`checkpoint.lossless`), since no header tells.
"""

from __future__ import annotations

from dataclasses import replace

from hotset.core.errors import ConfigError
from hotset.core.formats import LOSSLESS, WeightFormat
from hotset.core.geometry import ExpertSpec, ModelGeometry, MoELayer

_LEAVE_OUT = "leave `--lossless` out"


def with_lossless(geometry: ModelGeometry, lossless: bool) -> ModelGeometry:
    """The same model with the records that a config asks for; asked twice it is the same again.

    Args:
        lossless: `EngineConfig.lossless`.

    Raises:
        ConfigError: no weight of an expert is kept in BF16.
    """
    if not lossless:
        return geometry
    if geometry.dtype != "bfloat16":
        raise ConfigError(
            f"`--lossless` is for experts in bfloat16, this model computes in {geometry.dtype}",
            hint=f"{_LEAVE_OUT}, or use `--dtype bfloat16`, which rounds the weights",
            option="lossless",
        )
    layers = tuple(_packed(layer) for layer in geometry.layers)
    if not any(layer.expert.is_lossless for layer in layers):
        raise ConfigError(
            "`--lossless` is for experts in bfloat16, those of this model are quantised",
            hint=_LEAVE_OUT,
            option="lossless",
        )
    return replace(geometry, layers=layers)


def _packed(layer: MoELayer) -> MoELayer:
    old = layer.expert
    expert = ExpertSpec.build(
        hidden=old.hidden,
        intermediate=old.intermediate,
        gate=old.gate,
        has_bias=old.has_bias,
        dtype=old.dtype,
        weights=_of(old.up_format),
        down_weights=_of(old.down_format),
    )
    return replace(layer, expert=expert)


def _of(weights: WeightFormat) -> WeightFormat:
    return LOSSLESS if weights.is_plain else weights
