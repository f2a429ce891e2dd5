"""A model by name, before a weight is read: configs that are refused, headers that are checked."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import rewrite
from hotset.core.errors import CheckpointError
from hotset.models.describe import describe
from hotset.models.geometry import read_config
from quantised import DIALECTS
from tiny import save_tiny, tiny_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny("qwen3_moe", tmp_path, max_shard_size="1GB")
    return tmp_path


def set_config(folder: Path, **values: Any) -> Path:
    file = folder / "config.json"
    data = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return file


UNKNOWN = "model type `x` is not known to transformers "


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "x"}, UNKNOWN),
        ({"model_type": "x", "auto_map": {"AutoConfig": "a.B"}}, UNKNOWN),
        ({"model_type": None}, "has no `model_type`"),
        ({"dtype": "float3"}, "`dtype` is 'float3', which is no dtype of torch"),
        ({"torch_dtype": 5}, "`torch_dtype` is 5, which is no dtype of torch"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000, the most is 1024"),
        ({"text_config": {"num_hidden_layers": 1025}}, "is 1025, the most is 1024"),
        ({"hidden_size": "a"}, "Field 'hidden_size' expected int"),
    ],
)
def test_a_config_that_is_not_understood(tmp_path: Path, values: Any, message: str) -> None:
    """In our words where the library's speak of its own flags or end in mid-sentence."""
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    file = set_config(tmp_path, **values)
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert f"`{file}`" in caught.value.message
    assert message in caught.value.message
    assert "trust_remote_code" not in str(caught.value)
    assert caught.value.hint


def test_a_config_alone_is_described_and_said_to_be_unchecked(folder: Path) -> None:
    assert describe(str(folder)).weights_checked
    (folder / "model.safetensors").unlink()
    assert not describe(str(folder)).weights_checked


@pytest.mark.parametrize(
    ("config", "name", "group"),
    [
        (DIALECTS["int4"].config, "int4", 16),
        (DIALECTS["awq"].config, "int4", 16),
        (DIALECTS["gptq"].config, "int4", 16),
        (DIALECTS["nvfp4, ModelOpt"].config, "nvfp4", 16),
        (DIALECTS["fp8 blocks"].config, "fp8", 128),
        (DIALECTS["mxfp4, DeepSeek"].config, "mxfp4", 32),
        ({"quant_method": "mxfp4"}, "mxfp4", 32),
    ],
)
def test_without_weights_the_config_tells_the_format(
    folder: Path, config: dict[str, object], name: str, group: int
) -> None:
    plain = describe(str(folder)).geometry
    set_config(folder, quantization_config=config)
    (folder / "model.safetensors").unlink()
    geometry = describe(str(folder)).geometry
    expert = geometry.layers[0].expert
    assert (expert.up_format.name, expert.up_format.scale_columns) == (name, group)
    assert geometry.expert_bytes < plain.expert_bytes


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _other_sizes(folder: Path) -> None:
    set_config(folder, vocab_size=64)


def _quantised(folder: Path) -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name].to(torch.int8)})


def _missing_shard(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors, num_shards=2)
    next(folder.glob("model-00002*")).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "is truncated"),
        (_empty, "is empty"),
        (_other_sizes, "tensors of wrong shape"),
        (_quantised, "holds int8 codes without `scale`"),
        (_missing_shard, "lacks 1 of its 2 shards"),
    ],
)
def test_a_folder_that_cannot_load_is_not_described(
    folder: Path, damage: Any, message: str
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        describe(str(folder))


def test_what_is_left_out_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = ("model.layers.4.eh_proj.weight", "model.layers.4.mlp.gate.weight", "visual.a.weight")
    rewrite(folder, lambda tensors: tensors | {name: torch.zeros(2) for name in extra})
    with caplog.at_level(logging.WARNING, "hotset"):
        describe(str(folder))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"2 tensors of `{folder}` are not loaded: 2 in a layer for multi-token prediction beyond "
        "the model's own"
    )
