"""A model in numbers, from its config alone: built on the meta device, nothing is allocated.

The shapes come from the stock model itself, so no architecture is described here a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from hotset.checkpoint.params import ExpertParam
from hotset.checkpoint.source import resolve_config_only
from hotset.core.config import DTYPES
from hotset.core.errors import CheckpointError
from hotset.core.geometry import ExpertSpec, Gate, ModelGeometry, MoELayer
from hotset.models.attention_probe import find_attention
from hotset.models.footprint import Footprint, measure
from hotset.models.gate import find_gate
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
    except (OSError, *_BAD_CONFIG) as error:
        reason = _reason(error)
        raise CheckpointError(f"`{folder / 'config.json'}` is not usable: {reason}") from error
    return config


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
    with _stock_code(stock):
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
            hint="compare it with the one that was published",
        ) from error


def _reason(error: Exception) -> str:
    """A message on one line, with the kind of error where the message alone says little."""
    text = " ".join(str(error).split()[:40])
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
        raise CheckpointError(f"`config.json` routes a token to {top_k} of {num_experts} experts")
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
        resident_read_bytes=resident - _unread_bytes(model),
        max_context=getattr(text, "max_position_embeddings", 0) or 0,
        activation_fixed_bytes=used.activation_fixed_bytes,
        activation_bytes_per_token=used.activation_bytes_per_token,
        activation_bytes_per_context_token=used.activation_bytes_per_context_token,
        activation_bytes_per_pair=used.activation_bytes_per_pair,
        continues_in_chunks=config.model_type not in _CONTINUED_BY_TOKEN,
    )


def _unread_bytes(model: PreTrainedModel) -> int:
    """Bytes of an embedding table that serves as nothing else."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight = getattr(table, "weight", None)
    if weight is None or getattr(head, "weight", None) is weight:
        return 0
    return int(weight.numel() * weight.element_size())
