"""What the keys and values of a token take in the KV cache, as the model has them or in eight bits.

Eight bits: a byte for each element, and one for each head's power of two. Knows layers and bytes;
how they are rounded is `kernels.kv_fp8`'s business.
"""

from __future__ import annotations

from dataclasses import replace

from hotset.core.errors import ConfigError
from hotset.core.geometry import AttentionLayer, ModelGeometry
from hotset.core.record import DTYPE_BYTES


def kept_bytes(layer: AttentionLayer, element_bytes: int, *, fp8: bool) -> int:
    """Bytes that a token takes in one layer.

    Args:
        element_bytes: of the model's dtype.
        fp8: kept in eight bits.
    """
    num_heads, key_width, value_width = layer.cached
    if fp8:
        return num_heads * (key_width + 1 + value_width + 1)
    return num_heads * (key_width + value_width) * element_bytes


def with_kv_dtype(geometry: ModelGeometry, kv_dtype: str | None) -> ModelGeometry:
    """The same model with the cache that a config asks for.

    Args:
        kv_dtype: a choice of `EngineConfig.kv_dtype`.

    Raises:
        ConfigError: this model keeps what cannot be kept so.
    """
    if kv_dtype is None:
        return geometry
    refused = _refusal(geometry)
    if refused:
        raise ConfigError(
            f"`--kv-dtype {kv_dtype}` is not for this model: {refused}",
            hint="leave `--kv-dtype` out",
            option="kv_dtype",
        )
    size = DTYPE_BYTES[geometry.dtype]
    saved = [
        (layer.window, kept_bytes(layer, size, fp8=False) - kept_bytes(layer, size, fp8=True))
        for layer in geometry.attention
    ]
    return replace(
        geometry,
        kv_bytes_per_token=geometry.kv_bytes_per_token - sum(n for w, n in saved if w is None),
        # Of a window the stock cache keeps one token less than it is long.
        kv_fixed_bytes=geometry.kv_fixed_bytes - sum(n * (w - 1) for w, n in saved if w),
    )


def _refusal(geometry: ModelGeometry) -> str:
    if not geometry.attention:
        return f"it decodes in the library's cache: {geometry.attention_reason}"
    if any(layer.latent is not None for layer in geometry.attention):
        return "it keeps latents, which are small already and stand for keys and values at once"
    return ""
