"""Formats of which a config and the tensors do not tell the same: refused, not guessed at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_formats import make, save

from hotset.checkpoint.index import CheckpointIndex
from hotset.checkpoint.quantised import declared_quantisation
from hotset.core.errors import CheckpointError
from quantised import DIALECTS, compressed_int4, fp8, gptq


def four_bits(**values: object) -> dict[str, Any]:
    """A config of INT4 in groups of 16, and what it says besides."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, **values}
    return {**DIALECTS["int4"].config, "config_groups": {"g": {"weights": weights}}}


@pytest.mark.parametrize(
    ("suffix", "dialect"),
    [
        ("weight_zero_point", compressed_int4(zeros=True)),
        ("weight_g_idx", compressed_int4(ordered=True)),
        ("g_idx", gptq(ordered=True)),
    ],
)
def test_what_the_config_promises_is_there(suffix: str, dialect: Any, tmp_path: Path) -> None:
    """Without it the weights would be others, and plausible ones."""
    group, matrix = make(dialect)
    assert torch.equal(save(tmp_path, group, dialect.config).weight(), matrix), "the control"
    del group[suffix]
    with pytest.raises(CheckpointError, match=f"`a.* has no `{suffix}`, and `.* says"):
        save(tmp_path, group, dialect.config).fold()


def test_what_one_of_several_groups_promises_may_be_anothers(tmp_path: Path) -> None:
    group, matrix = make(compressed_int4())
    both = [four_bits(symmetric=flag)["config_groups"]["g"] for flag in (True, False)]
    config = {**four_bits(), "config_groups": dict(zip("ab", both, strict=True))}
    assert torch.equal(save(tmp_path, group, config).weight(), matrix)


@pytest.mark.parametrize("version", ["marlin", "v22", "exllama"])
def test_zero_points_of_an_unknown_version_are_not_guessed_at(version: str, tmp_path: Path) -> None:
    dialect = gptq(sym=False)
    group, _ = make(dialect)
    with pytest.raises(CheckpointError, match=f"says `{version}`, which does not tell"):
        save(tmp_path, group, {**dialect.config, "checkpoint_format": version}).fold()


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
@pytest.mark.parametrize("name", ["gptq_v2", "GPTQ_V2"])
def test_the_version_is_known_by_either_key(key: str, name: str, tmp_path: Path) -> None:
    dialect = gptq(sym=False, version=2)
    group, matrix = make(dialect)
    config = {k: v for k, v in dialect.config.items() if k != "checkpoint_format"}
    assert torch.equal(save(tmp_path, group, {**config, key: name}).weight(), matrix)


@pytest.mark.parametrize(
    ("dialect", "suffix"),
    [(gptq(ordered=True), "g_idx"), (compressed_int4(ordered=True), "weight_g_idx")],
)
@pytest.mark.parametrize("value", [-1, 99])
def test_a_column_of_no_group_is_refused(
    dialect: Any, suffix: str, value: int, tmp_path: Path
) -> None:
    group, _ = make(dialect)
    group[suffix][3] = value
    with pytest.raises(CheckpointError, match=r"`a\.weight` in .* names groups"):
        save(tmp_path, group, dialect.config).weight()


@pytest.mark.parametrize("block", [[0, 0], [-128, 128], [10**30, 128], [128], [128.0, 128.0]])
def test_blocks_of_no_size_are_refused(block: object, tmp_path: Path) -> None:
    dialect = fp8((8, 8), name="weight_scale_inv", dtype=torch.float32)
    group, _ = make(dialect)
    with pytest.raises(CheckpointError, match="expected rows and columns from 1"):
        save(tmp_path, group, {"quant_method": "fp8", "weight_block_size": block}).fold()


@pytest.mark.parametrize("width", [[4], "4", {}])
def test_a_width_that_is_no_number_is_refused(width: object, tmp_path: Path) -> None:
    group, _ = make(DIALECTS["int4"])
    with pytest.raises(CheckpointError, match="bits a value, hotset reads 4"):
        save(tmp_path, group, four_bits(num_bits=width)).fold()


@pytest.mark.parametrize("transform", [{}, {"config_groups": {}}, None])
def test_rotations_of_inputs_are_refused(transform: object, tmp_path: Path) -> None:
    def declare(value: object) -> None:
        config = {"quantization_config": {**four_bits(), "transform_config": value}}
        (tmp_path / "config.json").write_text(json.dumps(config))

    declare(transform)
    assert declared_quantisation(tmp_path) is not None, "one that asks for none"
    declare({"config_groups": {"u": {"type": "hadamard", "apply": []}}})
    with pytest.raises(CheckpointError, match="`transform_config`"):
        declared_quantisation(tmp_path)


@pytest.mark.parametrize(
    "text",
    ['{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,0]}}', '{"a":' + "[" * 100_000],
    ids=["beyond all integers", "beyond all depth"],
)
def test_a_header_beyond_all_limits_is_damage(text: str, tmp_path: Path) -> None:
    header = text.encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="its header is not understood"):
        CheckpointIndex.read(tmp_path)


def test_a_shard_by_a_name_that_no_file_has_is_missing(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "y" * 5000}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks 1 of its 1 shards: `y{100}`"):
        CheckpointIndex.read(tmp_path)
