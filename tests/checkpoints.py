"""Checkpoint folders for tests: opening, rewriting and comparing them.

Knows how a meta-device model is made for a configuration and what a record must hold; the latter
by plain indexing, independent of the loader's views.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hotset.checkpoint.index import CheckpointIndex
from hotset.checkpoint.mapping import KeyMap
from hotset.checkpoint.packed import fold
from hotset.checkpoint.params import ExpertParam
from hotset.checkpoint.quantised import declared_quantisation
from hotset.models.seam import class_config, hotset_class, model_class

Records = dict[tuple[int, int], dict[str, torch.Tensor]]


@dataclass
class Opened:
    """A checkpoint folder beside the meta-device model that it should fit."""

    model: Any
    params: tuple[ExpertParam, ...]
    key_map: KeyMap


def meta_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model on the meta device without its expert parameters."""
    stock = model_class(config)
    with torch.device("meta"):
        return hotset_class(stock)._from_config(
            class_config(stock, config), dtype=dtype, experts_implementation="hotset"
        )


def open_checkpoint(folder: Path, config: Any) -> Opened:
    model = meta_model(config)
    key_map = KeyMap.build(
        fold(CheckpointIndex.read(folder), declared_quantisation(folder)),
        model=model,
        params=model.hotset_params,
        towers=model.hotset_towers,
    )
    return Opened(model, model.hotset_params, key_map)


def empty_records(params: tuple[ExpertParam, ...], dtype: torch.dtype) -> Records:
    """Records of all experts, every element NaN, fields [2I or I, H], [H, I], [2I], [H]."""
    records: Records = {}
    for param in params:
        shape = param.shape[:0:-1] if param.transposed else param.shape[1:]
        for expert in range(param.shape[0]):
            fields = records.setdefault((param.layer, expert), {})
            fields[param.field] = torch.full(shape, float("nan"), dtype=dtype)
    return records


def expected_field(param: ExpertParam, fused: torch.Tensor, expert: int) -> torch.Tensor:
    """What a record's field must be, from the stock model's fused parameter."""
    value = fused[expert]
    if param.transposed:
        value = value.T
    if param.interleaved:
        value = torch.cat([value[0::2], value[1::2]])
    return value


def stock_experts(model: Any) -> list[Any]:
    """Experts modules of a stock model in order; towers of composite models have none."""
    return [m for m in model.modules() if hasattr(m, "has_gate") and hasattr(m, "is_transposed")]


def rewrite(
    folder: Path,
    edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor] | None],
    *,
    num_shards: int = 1,
) -> None:
    """Loads all tensors of a folder, lets `edit` change the dict, and saves them anew.

    One shard is saved as `model.safetensors` without an index file, several with one.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = edit(tensors) or tensors
    save_shards(folder, tensors, num_shards=num_shards)


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], *, num_shards: int) -> None:
    """Deals tensors out to shards in turn, so that an expert's pieces lie in different files."""
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[shard::num_shards]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
