"""A model in numbers, from its config alone: built on the meta device, nothing is allocated.

The shapes come from the stock model itself, so no architecture is described here a second time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hotset.checkpoint.files import read_json
from hotset.checkpoint.params import ExpertParam
from hotset.core.config import DTYPES
from hotset.core.errors import CheckpointError
from hotset.core.geometry import (
    MAX_LAYERS,
    AttentionLayer,
    ExpertSpec,
    Gate,
    ModelGeometry,
    MoELayer,
)
from hotset.core.kv_dtype import kept_bytes
from hotset.core.record import DTYPE_BYTES
from hotset.models.attention_probe import find_attention
from hotset.models.footprint import Footprint, measure
from hotset.models.gate import find_gate
from hotset.models.linear_kernels import plain_torch
from hotset.models.seam import (
    IMPLEMENTATION,
    class_config,
    experts_modules,
    hotset_class,
    model_class,
)

# Stock models whose recurrent layers start from zero in every forward of more than one token, so
# that a prompt cannot be continued in chunks. The sweep test compares every architecture's text in
# chunks with the text in one forward, and holds this list from both sides.
_CONTINUED_BY_TOKEN = ("jamba",)

_PUBLISHED_HINT = "compare it with the one that was published"
# Characters of a foreign message that are passed on, if a sentence ends there.
_MOST_REASON = 200

_TOP_K_NAMES = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "experts_per_token")


# What stock code raises on values that make no sense: wrong types, unknown names, shapes that do
# not go together.
_BAD_CONFIG = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)


@dataclass(frozen=True)
class MetaModel:
    """A stock model on the meta device with its experts taken out, and what follows from it.

    Attributes:
        model: on the meta device; never run.
        params: the fused parameters that were removed.
        towers: paths of vision and audio towers that were removed.
        geometry: the numbers.
        config: the config of `model`'s class (the text part of a composite one where that is
            what the class takes).
    """

    model: PreTrainedModel
    params: tuple[ExpertParam, ...]
    towers: tuple[str, ...]
    geometry: ModelGeometry
    config: PretrainedConfig


def read_config(folder: Path) -> PretrainedConfig:
    """`config.json` of a folder as transformers understands it.

    Raises:
        CheckpointError: it is missing, not JSON, or of an unknown model type or dtype, or says more
            layers than any model has.
    """
    path = folder / "config.json"
    raw = read_json(path)
    _check_dtypes(path, raw)
    _check_depth(path, raw)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, *_BAD_CONFIG) as error:
        _refuse_unknown_type(path, raw)
        raise CheckpointError(
            f"`{path}` is not usable: {_reason(error)}", hint=_PUBLISHED_HINT
        ) from error
    # Weights are read, and where needed dequantised, by hotset: to the library they are plain.
    for part in (config, config.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    return config


def _refuse_unknown_type(path: Path, raw: dict[str, Any]) -> None:
    """Says in our words that the library has no such model; its own speak of its own flags."""
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return
    if model_type is None:
        raise CheckpointError(f"`{path}` has no `model_type`", hint=_PUBLISHED_HINT)
    own = " and comes with code of its own" if "auto_map" in raw else ""
    raise CheckpointError(
        f"`{path}`: model type `{model_type}` is not known to transformers "
        f"{transformers.__version__}{own}",
        hint="hotset runs the architectures of this transformers version, and no code from a "
        "checkpoint; a newer hotset may know it",
    )


def _parts(raw: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The config, and that of the text model within it."""
    text = raw.get("text_config")
    return (raw, text) if isinstance(text, dict) else (raw,)


def _check_depth(path: Path, raw: dict[str, Any]) -> None:
    for part in _parts(raw):
        value = part.get("num_hidden_layers")
        if isinstance(value, int) and value > MAX_LAYERS:
            raise CheckpointError(
                f"`{path}`: `num_hidden_layers` is {value}, the most is {MAX_LAYERS}",
                hint=_PUBLISHED_HINT,
            )


def _check_dtypes(path: Path, raw: dict[str, Any]) -> None:
    for part in _parts(raw):
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            name = str(value).removeprefix("torch.")
            if value is not None and not isinstance(getattr(torch, name, None), torch.dtype):
                raise CheckpointError(
                    f"`{path}`: `{key}` is {value!r}, which is no dtype of torch",
                    hint=f"correct it; it may be one of {', '.join(DTYPES)}",
                )


def build_meta(config: PretrainedConfig, dtype: str | None = None) -> MetaModel:
    """Builds the meta-device model of a config and takes its experts out.

    Raises:
        CheckpointError: no such architecture, values that it cannot be built from, no experts, or
            experts that are not understood.
    """
    stock = model_class(config)
    config = class_config(stock, config)
    dtype_name = dtype or config_dtype(config)
    with _stock_code(stock), torch.device("meta"):
        model = hotset_class(stock)._from_config(
            config, dtype=getattr(torch, dtype_name), experts_implementation=IMPLEMENTATION
        )
    model.eval()
    params: tuple[ExpertParam, ...] = model.hotset_params
    towers: tuple[str, ...] = model.hotset_towers
    layers = tuple(
        _layer(model, path, module, [p for p in params if p.module == path], dtype_name)
        for path, module in experts_modules(model).items()
    )
    with _stock_code(stock), plain_torch():  # kernels cannot run on tensors without values
        geometry = _geometry(model, config, layers, dtype_name)
    return MetaModel(model, params, towers, geometry, config)


@contextmanager
def _stock_code(stock: type[PreTrainedModel]) -> Iterator[None]:
    """What stock code raises within the block comes from values in the config."""
    try:
        yield
    except _BAD_CONFIG as error:
        raise CheckpointError(
            f"`config.json` describes a `{stock.__name__}` that cannot be built: {_reason(error)}",
            hint=_PUBLISHED_HINT,
        ) from error


def _reason(error: Exception) -> str:
    """The first sentences of a message on one line, with the kind of error where the message
    alone says little."""
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(str(error).split()))
    text = sentences[0]
    for sentence in sentences[1:]:
        if len(text) + len(sentence) > _MOST_REASON:
            break
        text += f" {sentence}"
    text = text if len(text) <= 2 * _MOST_REASON else f"{text[: 2 * _MOST_REASON]} ..."
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


def config_dtype(config: PretrainedConfig) -> str:
    """The dtype a checkpoint is stored in, `bfloat16` where its config does not say.

    Raises:
        CheckpointError: it is stored in a dtype that nothing is computed in.
    """
    text = config.get_text_config()
    for part in (config, text):
        value = getattr(part, "dtype", None)
        if value is not None:
            name = str(value).removeprefix("torch.")
            if name not in DTYPES:
                raise CheckpointError(
                    f"the checkpoint's dtype is `{name}`", hint=f"use `--dtype {DTYPES[0]}`"
                )
            return name
    return "bfloat16"


def _layer(
    model: nn.Module, path: str, module: nn.Module, params: list[ExpertParam], dtype: str
) -> MoELayer:
    by_field = {param.field: param for param in params}
    if not {"up", "down"} <= by_field.keys():
        raise CheckpointError(f"experts module `{path}` lacks a projection: {sorted(by_field)}")
    gate = find_gate(module, name=path)
    num_experts, hidden, intermediate = _sizes(by_field["down"])
    expert = ExpertSpec.build(
        hidden=hidden,
        intermediate=intermediate,
        gate=gate,
        has_bias="up_bias" in by_field,
        dtype=dtype,
    )
    _check_up(by_field["up"], expert, gate, num_experts)
    top_k = _top_k(model, path)
    if not 1 <= top_k <= num_experts:
        raise CheckpointError(
            f"`config.json` routes a token to {top_k} of {num_experts} experts",
            hint=_PUBLISHED_HINT,
        )
    return MoELayer(
        path,
        num_experts,
        top_k,
        expert,
        has_post_norm=bool(module.has_post_expert_norm),
    )


def _sizes(down: ExpertParam) -> tuple[int, int, int]:
    """(E, H, I) from the second projection: [E, H, I], or [E, I, H] when stored transposed."""
    num_experts, rows, columns = down.shape
    return (num_experts, columns, rows) if down.transposed else (num_experts, rows, columns)


def _check_up(up: ExpertParam, expert: ExpertSpec, gate: Gate, num_experts: int) -> None:
    rows = (2 if gate.has_gate else 1) * expert.intermediate
    want = (
        (num_experts, expert.hidden, rows) if up.transposed else (num_experts, rows, expert.hidden)
    )
    if up.shape != want:
        raise CheckpointError(f"`{up.full_name}` has shape {up.shape}, expected {want}")


def _top_k(model: nn.Module, path: str) -> int:
    """Experts per token: the router beside the experts says it, else the config."""
    parent = model.get_submodule(path.rpartition(".")[0])
    for module in parent.modules():
        value = getattr(module, "top_k", None)
        if isinstance(value, int):
            return value
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    for name in _TOP_K_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise CheckpointError(f"cannot tell how many experts a token uses in `{path}`")


def _geometry(
    model: PreTrainedModel, config: PretrainedConfig, layers: tuple[MoELayer, ...], dtype: str
) -> ModelGeometry:
    text = config.get_text_config()
    resident = sum(p.numel() * p.element_size() for p in model.parameters())
    resident += sum(b.numel() * b.element_size() for b in model.buffers())
    used: Footprint = measure(model, text.vocab_size)
    attention = find_attention(model)  # with the experts that `measure` has bound
    used = _with_our_indices(used, attention.layers, DTYPE_BYTES[dtype])
    return ModelGeometry(
        model_type=config.model_type,
        dtype=dtype,
        layers=layers,
        resident_bytes=resident,
        kv_bytes_per_token=used.kv_bytes_per_token,
        kv_fixed_bytes=used.kv_fixed_bytes,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        num_layers=text.num_hidden_layers,
        attention=attention.layers,
        attention_reason=attention.reason,
        states=attention.states,
        resident_read_bytes=resident - _unread_bytes(model),
        max_context=getattr(text, "max_position_embeddings", 0) or 0,
        activation_fixed_bytes=used.activation_fixed_bytes,
        activation_bytes_per_token=used.activation_bytes_per_token,
        activation_bytes_per_context_token=(
            _joined_bytes(attention.layers, dtype)
            if attention.ok
            else used.activation_bytes_per_context_token
        ),
        # Over a pool attention runs in flash form: neither masks nor scores.
        activation_bytes_per_pair=0 if attention.ok else used.activation_bytes_per_pair,
        continues_in_chunks=config.model_type not in _CONTINUED_BY_TOKEN,
        recurrent=_is_recurrent(text),
    )


def _with_our_indices(
    used: Footprint, layers: Sequence[AttentionLayer], element_bytes: int
) -> Footprint:
    """With what our indexers keep: one key for each pool, where the stock one keeps every token."""
    indexers = [layer.indexer for layer in layers if layer.indexer is not None]
    if not indexers:
        return used
    keys = sum(indexer.token_bytes(element_bytes) for indexer in indexers)
    recent = sum(indexer.row_bytes(element_bytes) for indexer in indexers)
    return replace(
        used,
        kv_bytes_per_token=sum(kept_bytes(layer, element_bytes, fp8=False) for layer in layers)
        + keys,
        kv_fixed_bytes=used.kv_fixed_bytes + recent,
    )


def _joined_bytes(layers: Sequence[AttentionLayer], dtype: str) -> int:
    """What is cached of one token, in the layer that has most, as a later chunk sees it; values
    that are narrower than keys once more, padded (`kernels.attention`)."""
    widths = []
    for layer in layers:
        num_heads, key_width, value_width = layer.cached
        is_padded = layer.latent is None and value_width < key_width
        widths.append(num_heads * (key_width + value_width + is_padded * key_width))
    return max(widths) * DTYPE_BYTES[dtype]


def _is_recurrent(text: PretrainedConfig) -> bool:
    """By the cache that the library makes for it."""
    layers = DynamicCache(config=text).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def _unread_bytes(model: PreTrainedModel) -> int:
    """Bytes of an embedding table that serves as nothing else."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight = getattr(table, "weight", None)
    if weight is None or getattr(head, "weight", None) is weight:
        return 0
    return int(weight.numel() * weight.element_size())
