"""A model in numbers, from its config alone: built on the meta device, nothing is allocated.

The shapes come from the stock model itself, so no architecture is described here a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from hotset.checkpoint.params import ExpertParam
from hotset.checkpoint.source import resolve_config_only
from hotset.core.errors import CheckpointError
from hotset.core.geometry import ExpertSpec, Gate, ModelGeometry, MoELayer
from hotset.models.footprint import Footprint, measure
from hotset.models.gate import find_gate
from hotset.models.seam import (
    IMPLEMENTATION,
    class_config,
    experts_modules,
    hotset_class,
    model_class,
)

_TOP_K_NAMES = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "experts_per_token")


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


def describe(model: str, dtype: str | None = None, revision: str | None = None) -> ModelGeometry:
    """The geometry of a model by name, without reading a weight.

    Args:
        model: hub id, local folder or `pocket`; of a hub id only its config is fetched.
        dtype: compute dtype; default the checkpoint's own.
    """
    return build_meta(read_config(resolve_config_only(model, revision)), dtype).geometry


def read_config(folder: Path) -> PretrainedConfig:
    """`config.json` of a folder as transformers understands it.

    Raises:
        CheckpointError: it is missing, not JSON, or of an unknown model type.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"`{folder / 'config.json'}` is not usable: {reason}") from error
    return config


def build_meta(config: PretrainedConfig, dtype: str | None = None) -> MetaModel:
    """Builds the meta-device model of a config and takes its experts out.

    Raises:
        CheckpointError: no such architecture, no experts, or experts that are not understood.
    """
    stock = model_class(config)
    config = class_config(stock, config)
    dtype_name = dtype or config_dtype(config)
    with torch.device("meta"):
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
    return MetaModel(model, params, towers, _geometry(model, config, layers, dtype_name), config)


def config_dtype(config: PretrainedConfig) -> str:
    """The dtype a checkpoint is stored in, `bfloat16` where its config does not say."""
    text = config.get_text_config()
    for part in (config, text):
        value = getattr(part, "dtype", None)
        if value is not None:
            return str(value).removeprefix("torch.")
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
    return MoELayer(
        path,
        num_experts,
        _top_k(model, path),
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
        max_context=getattr(text, "max_position_embeddings", 0) or 0,
        activation_bytes_per_token=used.activation_bytes_per_token,
        activation_bytes_per_context_token=used.activation_bytes_per_context_token,
        activation_bytes_per_pair=used.activation_bytes_per_pair,
    )
