"""Every tensor of a checkpoint is accounted for, and what does not fit is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoints import open_checkpoint, rewrite
from hotset.checkpoint.validate import check_complete, check_finite_core, check_materialised
from hotset.core.errors import CheckpointError
from tiny import COMPOSITE_MODEL_TYPES, TINY_MODEL_TYPES, save_tiny, tiny_config

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.1.mlp.experts"
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny per-expert checkpoint in one file: 4 layers, 8 experts."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    save_tiny("qwen3_moe", folder, max_shard_size="1GB")
    return folder


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose experts are fused on disk, under other names."""
    folder = tmp_path_factory.mktemp("granitemoe")
    save_tiny("granitemoe", folder, max_shard_size="1GB")
    return folder


@pytest.mark.parametrize("model_type", TINY_MODEL_TYPES)
def test_a_sound_checkpoint_raises_no_alarm(tmp_path: Path, model_type: str) -> None:
    save_tiny(model_type, tmp_path)
    opened = open_checkpoint(tmp_path, tiny_config(model_type))
    check_complete(opened.key_map, model=opened.model)
    key_map = opened.key_map
    assert {piece.param for piece in key_map.pieces} == set(opened.params)
    assert not key_map.unexpected
    # Only whole published checkpoints hold more than the text model.
    assert bool(key_map.ignored) == (model_type in COMPOSITE_MODEL_TYPES)
    assert {reason for _, reason in key_map.ignored} <= {
        "a vision or audio tower, not loaded for text"
    }


def _edited(source: Path, folder: Path, edit: Callable[[Tensors], Tensors | None]) -> str:
    """The message that the edited checkpoint is refused with."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    rewrite(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        opened = open_checkpoint(folder, tiny_config(source.name.rstrip("0123456789")))
        check_complete(opened.key_map, model=opened.model)
    message = caught.value.message
    assert FILE not in message or f"`{folder / FILE}`" in message
    return message.replace(f"{folder}/", "").replace(f" in `{folder}` does not", " does not")


def _rename_layer(tensors: Tensors) -> Tensors:
    return {
        name.replace("layers.1.mlp.experts", "layers.1.mlp.xperts"): t
        for name, t in tensors.items()
    }


def _drop(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: t for name, t in tensors.items() if not any(part in name for part in parts)
    }


def _add(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensor}


def _ten_experts(tensors: Tensors) -> None:
    for expert in (8, 9):
        tensors[f"{EXPERTS}.{expert}.up_proj.weight"] = torch.zeros(16, 32)


def _fused_as_well(tensors: Tensors) -> None:
    tensors[f"{EXPERTS}.down_proj"] = torch.zeros(8, 32, 16)


FOREIGN = "weights in a dtype that hotset does not read (1): "
APART = "quantised weights that do not go together: "
FIT = "the checkpoint does not fit `Qwen3MoeForCausalLM`: "

FAULTS = {
    "one expert renamed to nothing the model knows": (
        lambda tensors: {
            name.replace(f"{EXPERTS}.3.down", f"{EXPERTS}.3.dwn"): t for name, t in tensors.items()
        },
        f"{FIT}missing expert tensors (1): `{EXPERTS}.3.down_proj.weight`; "
        f"unexpected tensors (1): `{EXPERTS}.3.dwn_proj.weight` in `{FILE}`",
    ),
    "a layer renamed": (
        _rename_layer,
        f"{FIT}missing expert tensors (2): `{EXPERTS}.gate_up_proj` of all 8 experts, "
        f"`{EXPERTS}.down_proj` of all 8 experts; unexpected tensors (24): "
        "`model.layers.1.mlp.xperts.0.down_proj.weight` in `model.safetensors`, "
        "`model.layers.1.mlp.xperts.0.gate_proj.weight` in `model.safetensors`, "
        "`model.layers.1.mlp.xperts.0.up_proj.weight` in `model.safetensors`, "
        "`model.layers.1.mlp.xperts.1.down_proj.weight` in `model.safetensors`, "
        "`model.layers.1.mlp.xperts.1.gate_proj.weight` in `model.safetensors` and 19 more",
    ),
    "a gap: experts 0, 1, 3, ...": (
        _drop(f"{EXPERTS}.2."),
        f"{FIT}missing expert tensors (3): `{EXPERTS}.2.gate_proj.weight`, "
        f"`{EXPERTS}.2.up_proj.weight`, `{EXPERTS}.2.down_proj.weight`",
    ),
    "one projection of all experts": (
        _drop(*(f"{EXPERTS}.{expert}.up_proj" for expert in range(8))),
        f"{FIT}missing expert tensors (8): "
        + ", ".join(
            f"`mlp.experts.*.up_proj.weight` of expert {expert} in `{EXPERTS}`"
            for expert in range(5)
        )
        + " and 3 more",
    ),
    "more experts than the config says": (
        _ten_experts,
        f"{FIT}unexpected tensors (2): "
        f"`{EXPERTS}.8.up_proj.weight` in `{FILE}` (the model has 8 experts), "
        f"`{EXPERTS}.9.up_proj.weight` in `{FILE}` (the model has 8 experts)",
    ),
    "an expert that is no number": (
        _add(f"{EXPERTS}.x.up_proj.weight", torch.zeros(16, 32)),
        f"{FIT}unexpected tensors (1): `{EXPERTS}.x.up_proj.weight` in `{FILE}`",
    ),
    "a resident weight": (
        _drop("layers.2.mlp.gate.weight", "model.norm"),
        f"{FIT}missing tensors (2): `model.layers.2.mlp.gate.weight`, `model.norm.weight`",
    ),
    "a tensor that nobody asks for": (
        _add("model.layers.0.self_attn.extra.weight", torch.zeros(2)),
        f"{FIT}unexpected tensors (1): `model.layers.0.self_attn.extra.weight` in `{FILE}`",
    ),
    "an expert bias that the model does not have": (
        _add(f"{EXPERTS}.0.up_proj.bias", torch.zeros(16)),
        f"{FIT}unexpected tensors (1): `{EXPERTS}.0.up_proj.bias` in `{FILE}`",
    ),
    "a resident weight of wrong shape": (
        _add("model.norm.weight", torch.zeros(31)),
        f"{FIT}tensors of wrong shape (1): "
        f"`model.norm.weight` in `{FILE}` [31] for `model.norm.weight` [32]",
    ),
    "an expert of wrong shape": (
        _add(f"{EXPERTS}.5.up_proj.weight", torch.zeros(15, 32)),
        f"{FIT}tensors of wrong shape (1): "
        f"`{EXPERTS}.5.gate_proj.weight` in `{FILE}` [16, 32] and "
        f"`{EXPERTS}.5.up_proj.weight` in `{FILE}` [15, 32] "
        f"for `{EXPERTS}.gate_up_proj` [8, 32, 32]",
    ),
    "a transposed expert": (
        _add(f"{EXPERTS}.5.down_proj.weight", torch.zeros(16, 32)),
        f"{FIT}tensors of wrong shape (1): `{EXPERTS}.5.down_proj.weight` in `{FILE}` [16, 32] "
        f"for `{EXPERTS}.down_proj` [8, 32, 16]",
    ),
    "one weight fused and by expert": (
        _fused_as_well,
        f"{FIT}weights given twice (8): "
        + ", ".join(
            f"`{EXPERTS}.down_proj` in `{FILE}` and "
            f"`{EXPERTS}.{expert}.down_proj.weight` in `{FILE}`"
            for expert in range(5)
        )
        + " and 3 more",
    ),
    "two names for one resident weight": (
        _add("norm.weight", torch.ones(32)),
        f"{FIT}weights given twice (1): `model.norm.weight` in `{FILE}` and "
        f"`norm.weight` in `{FILE}`",
    ),
    "packed integers": (
        _add(f"{EXPERTS}.5.up_proj.weight", torch.zeros(16, 32, dtype=torch.int32)),
        f"{FOREIGN}`{EXPERTS}.5.up_proj.weight` in `{FILE}` (int32)",
    ),
    "float8 in the attention": (
        _add(
            "model.layers.0.self_attn.q_proj.weight",
            torch.zeros(32, 32).to(torch.float8_e4m3fn),
        ),
        f"{APART}tensor `model.layers.0.self_attn.q_proj.weight` in `{FILE}` holds float8_e4m3fn "
        "codes without `weight_scale_inv`; expected beside it: `weight_scale_inv`",
    ),
    "scales beside expert weights": (
        _add(f"{EXPERTS}.0.up_proj.weight_scale_inv", torch.ones(1, 1)),
        f"{APART}tensor `{EXPERTS}.0.up_proj.weight_scale_inv` in `{FILE}` is beside no quantised "
        "weight",
    ),
    "scales beside fused weights": (
        _add(f"{EXPERTS}.down_proj_scales", torch.ones(8, 1)),
        f"{FIT}unexpected tensors (1): `{EXPERTS}.down_proj_scales` in `{FILE}`",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_does_not_fit_is_refused(qwen: Path, tmp_path: Path, fault: str) -> None:
    edit, message = FAULTS[fault]
    assert _edited(qwen, tmp_path, edit) == message


FUSED = "model.layers.0.block_sparse_moe"

FUSED_FAULTS = {
    "one expert too few": (
        _add(f"{FUSED}.output_linear.weight", torch.zeros(7, 32, 48)),
        f"tensors of wrong shape (1): `{FUSED}.output_linear.weight` in `{FILE}` [7, 32, 48] "
        f"for `{FUSED}.experts.down_proj` [8, 32, 48]",
    ),
    "no first projection": (
        _drop(f"{FUSED}.input_linear"),
        f"missing expert tensors (1): `{FUSED}.experts.gate_up_proj` of all 8 experts",
    ),
}


@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_a_fused_checkpoint_that_does_not_fit_is_refused(
    granite: Path, tmp_path: Path, fault: str
) -> None:
    edit, message = FUSED_FAULTS[fault]
    expected = f"the checkpoint does not fit `GraniteMoeForCausalLM`: {message}"
    assert _edited(granite, tmp_path, edit) == expected


def test_one_expert_of_a_converted_resident_weight(tmp_path: Path) -> None:
    """kimi_linear keeps one convolution where its checkpoints have three."""
    save_tiny("kimi_linear", tmp_path, max_shard_size="1GB")
    rewrite(tmp_path, _drop("layers.0.self_attn.v_conv1d"))
    opened = open_checkpoint(tmp_path, tiny_config("kimi_linear"))
    with pytest.raises(CheckpointError) as caught:
        check_complete(opened.key_map, model=opened.model)
    name = "model.layers.0.self_attn"
    assert caught.value.message == (
        f"the checkpoint in `{tmp_path}` does not fit `KimiLinearForCausalLM`: "
        "tensors of wrong shape (1): "
        f"`{name}.k_conv1d.weight` in `{tmp_path / FILE}` [32, 1, 4] and "
        f"`{name}.q_conv1d.weight` in `{tmp_path / FILE}` [32, 1, 4] "
        f"for `{name}.conv1d.weight` [96, 1, 4]"
    )


def test_one_expert_is_a_model_too(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    config.num_experts = config.num_experts_per_tok = 1
    save_tiny("qwen3_moe", tmp_path, config=config)
    opened = open_checkpoint(tmp_path, config)
    check_complete(opened.key_map, model=opened.model)
    assert len(opened.key_map.pieces) == 4 * 3


MTP = "in a layer for multi-token prediction beyond the model's own"


def test_what_is_rightly_ignored_is_said(qwen: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen, tmp_path, dirs_exist_ok=True)
    extra = {
        "model.layers.4.mlp.experts.0.up_proj.weight": MTP,
        "layers.4.eh_proj.weight": MTP,
        "model.visual.blocks.0.attn.qkv.weight": "a vision or audio tower, not loaded for text",
        "audio_tower.conv1.weight": "a vision or audio tower, not loaded for text",
        "model.layers.0.self_attn.rotary_emb.inv_freq": "a buffer that the model computes "
        "by itself",
    }
    rewrite(tmp_path, lambda tensors: tensors | {name: torch.zeros(2) for name in extra})
    opened = open_checkpoint(tmp_path, tiny_config("qwen3_moe"))
    check_complete(opened.key_map, model=opened.model)
    assert {entry.name: reason for entry, reason in opened.key_map.ignored} == extra


def test_a_plain_layer_beyond_the_depth_is_not_ignored(qwen: Path, tmp_path: Path) -> None:
    """Whoever wrote one layer less into `config.json` hears of the weights that have no place."""
    config = tiny_config("qwen3_moe")
    config.num_hidden_layers -= 1
    extra = {"model.layers.6.input_layernorm.weight": torch.zeros(32)}
    shutil.copytree(qwen, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: tensors | extra)
    opened = open_checkpoint(tmp_path, config)
    unexpected = {entry.name for entry, _ in opened.key_map.unexpected}
    assert extra.keys() < unexpected
    assert "model.layers.3.mlp.gate.weight" in unexpected
    with pytest.raises(CheckpointError, match="unexpected tensors") as caught:
        check_complete(opened.key_map, model=opened.model)
    assert caught.value.hint == (
        "by `config.json` there is no layer 3, 6; is `num_hidden_layers` right?"
    )


def test_tied_weights_need_one_of_the_two(qwen: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, _drop("lm_head"))
    config = tiny_config("qwen3_moe")
    opened = open_checkpoint(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"missing tensors \(1\): `lm_head.weight`"):
        check_complete(opened.key_map, model=opened.model)
    config.tie_word_embeddings = True
    opened = open_checkpoint(tmp_path, config)
    check_complete(opened.key_map, model=opened.model)


def test_weights_without_the_models_prefix_are_found(qwen: Path, tmp_path: Path) -> None:
    """A checkpoint of the base model, as `AutoModel` saves it."""
    shutil.copytree(qwen, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: {n.removeprefix("model."): t for n, t in tensors.items()})
    opened = open_checkpoint(tmp_path, tiny_config("qwen3_moe"))
    check_complete(opened.key_map, model=opened.model)


def test_placeholders_are_found() -> None:
    with torch.device("meta"):
        model = torch.nn.BatchNorm1d(2)
    with pytest.raises(CheckpointError) as caught:
        check_materialised(model)
    assert caught.value.message == (
        "tensors that were not loaded (5): `weight`, `bias`, `running_mean`, `running_var`, "
        "`num_batches_tracked`"
    )
    check_materialised(torch.nn.BatchNorm1d(2))


def test_resident_weights_must_be_finite() -> None:
    model = torch.nn.Linear(2, 2)
    check_finite_core(model)
    with torch.no_grad():
        model.bias[1] = float("inf")
    with pytest.raises(CheckpointError, match=r"resident weights with NaN or Inf \(1\): `bias`"):
        check_finite_core(model)
