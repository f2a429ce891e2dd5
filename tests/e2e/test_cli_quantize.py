"""`hotset quantize` from its arguments to a checkpoint that loads."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from families import Family, make_family, text
from hotset.checkpoint.index import CheckpointIndex
from hotset.checkpoint.packed import PackedEntry, fold
from hotset.checkpoint.quantised import declared_quantisation
from hotset.checkpoint.rtn import TARGETS, quantise
from hotset.cli.main import main
from hotset.cli.quantize import FORMATS
from hotset.runtime.verify import check_records, check_stock
from hotset.runtime.weights import CheckpointWeights
from quantised import DIALECTS, quantise_folder
from tiny import tiny_config

# Largest distance of a value from the nearest of its format, relative to its group's largest: half
# of the widest gap between codes. INT4 has codes -8..7 and a scale of largest / 7.5, so that the
# largest itself, at 7.5, is half a step away, and BF16 scales are 2^-9 off; E2M1's gap of 2 below
# 6, whose scale as E4M3 is up to 2^-4 off (NVFP4), or a power of two up to which the largest is
# cut off at 6 of 8 (MXFP4); E4M3 has 4 bits of precision.
ERRORS = {"int4": 0.5 / 7.5 + 2**-8, "fp8": 2**-4, "nvfp4": 1 / 6 + 2**-4, "mxfp4": 0.25}


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    code = caught.value.code
    captured = capsys.readouterr()
    return int(code or 0), captured.out, captured.err


def config_of(model_type: str) -> Any:
    """Sizes that are multiples of a group."""
    config = tiny_config(model_type)
    text_config = config.get_text_config()
    for name in ("moe_intermediate_size", "intermediate_size"):
        if getattr(text_config, name, None):
            setattr(text_config, name, 32)
    return config


@pytest.mark.parametrize("target", FORMATS)
def test_values_go_to_the_nearest_code(target: str) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * 0.1
    tensors = quantise(weight, target)
    group = {"int4": 32, "nvfp4": 16, "mxfp4": 32, "fp8": 64}[target]
    largest = weight.unflatten(1, (-1, group)).abs().amax(-1, keepdim=True)
    if target == "fp8":
        largest = largest.amax().expand_as(largest)
    back = unpacked(tensors, target)
    error = ((back - weight).unflatten(1, (-1, group)).abs() / largest).max()
    assert error <= ERRORS[target]
    assert error >= ERRORS[target] / 16  # the bound says something


def unpacked(tensors: dict[str, torch.Tensor], target: str) -> torch.Tensor:
    from hotset.checkpoint.formats.fp8 import Fp8
    from hotset.checkpoint.formats.int4 import Int4
    from hotset.checkpoint.formats.mxfp4 import Mxfp4
    from hotset.checkpoint.formats.nvfp4 import Nvfp4

    shape = (40, 64)
    formats = {
        "int4": Int4(shape, 32, "bfloat16", zeros=False, ordered=False),
        "fp8": Fp8(shape, "weight_scale", "float32", (128, 128)),
        "nvfp4": Nvfp4(shape, "weight_packed"),
        "mxfp4": Mxfp4(shape, ("weight_packed", "weight_scale")),
    }
    return formats[target].dequantise(tensors)


@pytest.mark.parametrize(
    ("model_type", "target"),
    [
        ("qwen3_moe", "int4"),
        ("gemma4", "nvfp4"),
        ("mixtral", "mxfp4"),
        ("gpt_oss", "mxfp4"),
        ("aria_text", "int4"),  # the library has its experts as [in, out]
    ],
)
def test_a_quantised_checkpoint_loads_and_is_right(
    model_type: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_family(model_type, tmp_path / "plain", config=config_of(model_type))
    output = tmp_path / "quantised"
    code, out, err = run(capsys, "quantize", plain.folder, "--format", target, "-o", output)
    assert code == 0 and str(output) in out
    assert "calibrated quantisation" in err
    packed = Family(output, CheckpointWeights(str(output), dtype="float32"))
    assert {layer.expert.up_format.name for layer in packed.source.geometry.layers} == {target}
    with packed.engine() as engine:
        assert check_records(engine, packed.source).ok
        for check in check_stock(engine, packed.source, text(24)):
            assert check.ok, check
    index = fold(CheckpointIndex.read(output), declared_quantisation(output))
    before = load_file(plain.folder / "model.safetensors")
    kept = {n: t for n, t in load_file(next(output.glob("*.safetensors"))).items() if n in before}
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept.items())
    layers = packed.source.geometry.layers
    # gpt-oss keeps the two tensors of all experts of a layer.
    num_packed = (
        2 * len(layers)
        if model_type == "gpt_oss"
        else 3 * sum(layer.num_experts for layer in layers)
    )
    assert sum(isinstance(entry, PackedEntry) for entry in index.values()) == num_packed


def test_gpt_oss_is_written_as_the_library_reads_it(tmp_path: Path, capsys: Any) -> None:
    """Names, order of nibbles and of rows, against transformers' own dequantisation."""
    plain = make_family("gpt_oss", tmp_path / "plain", config=config_of("gpt_oss"))
    output = tmp_path / "quantised"
    assert run(capsys, "quantize", plain.folder, "--format", "mxfp4", "-o", output)[0] == 0
    before = load_file(plain.folder / "model.safetensors")
    after = load_file(next(output.glob("*.safetensors")))
    for name in ("gate_up_proj", "down_proj"):
        head = f"model.layers.1.mlp.experts.{name}"
        # [E, K, N], as the parameter is.
        back = convert_moe_packed_tensors(
            after[f"{head}_blocks"], after[f"{head}_scales"], dtype=torch.float32
        )
        want = before[head].float()
        largest = want.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True)
        error = (back - want).unflatten(1, (-1, 32)).abs() / largest
        assert error.max() <= ERRORS["mxfp4"]
        # The control: rows of gate and up the other way round.
        swapped = (back.roll(1, dims=2) - want).unflatten(1, (-1, 32)).abs() / largest
        assert swapped.max() > 1
        assert torch.equal(after[f"{head}_bias"], before[f"{head}_bias"])
    assert declared_quantisation(output).method == "mxfp4"


def test_gpt_oss_has_no_other_layout(tmp_path: Path, capsys: Any) -> None:
    plain = make_family("gpt_oss", tmp_path / "plain", config=config_of("gpt_oss"))
    code, _, err = run(capsys, "quantize", plain.folder, "--format", "int4", "-o", tmp_path / "new")
    assert code == 2 and "`--format int4`: experts with interleaved rows or biases" in err
    assert "use `--format mxfp4`" in err and not (tmp_path / "new").exists()


def test_the_result_is_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = make_family("qwen3_moe", tmp_path / "plain", config=config_of("qwen3_moe"))
    output = tmp_path / "new"
    code, out, _ = run(capsys, "quantize", plain.folder, "--format", "fp8", "-o", output, "--json")
    data = json.loads(out)
    assert code == 0 and data["format"] == "fp8"
    files = sum(entry.nbytes for entry in CheckpointIndex.read(output).values())
    assert data["num_bytes"] == files < data["source_bytes"]


def test_what_cannot_be_quantised_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_family("qwen3_moe", tmp_path / "plain", config=config_of("qwen3_moe"))
    output = tmp_path / "new"
    code, _, err = run(capsys, "quantize", plain.folder, "--format", "int3", "-o", output)
    assert code == 2 and "`--format int3` is not one of int4, fp8, nvfp4, mxfp4" in err
    code, _, err = run(capsys, "quantize", plain.folder, "-o", plain.folder)
    assert code == 2 and "is there already" in err
    (file := tmp_path / "file").touch()
    code, _, err = run(capsys, "quantize", plain.folder, "-o", file / "new")
    assert code == 2 and "cannot be made: Not a directory" in err
    run(capsys, "quantize", plain.folder, "-o", output)
    code, _, err = run(capsys, "quantize", output, "-o", tmp_path / "again")
    assert code == 1 and "is quantised already" in err
    small = make_family("qwen3_moe", tmp_path / "small")
    code, _, err = run(capsys, "quantize", small.folder, "-o", tmp_path / "third")
    assert code == 1 and "needs a multiple of 32" in err


def test_quantised_weights_besides_the_experts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would be copied under a config that does not speak of them."""
    blocks = DIALECTS["fp8 blocks"]
    plain = make_family("qwen3_moe", tmp_path / "plain", config=config_of("qwen3_moe"))
    packed, output = tmp_path / "packed", tmp_path / "new"
    quantise_folder(
        plain.folder,
        packed,
        lambda name: blocks if name.endswith("layers.1.self_attn.k_proj.weight") else None,
        config=blocks.config,
    )
    CheckpointWeights(str(packed), dtype="float32")  # is one that loads
    code, _, err = run(capsys, "quantize", packed, "-o", output)
    assert code == 1
    assert "weights besides the experts (1) are quantised already" in err
    assert "`model.layers.1.self_attn.k_proj.weight`" in err and "BF16 checkpoint" in err
    assert not output.exists()


def test_an_interrupted_one_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the same command can be given again."""
    plain = make_family("qwen3_moe", tmp_path / "plain", config=config_of("qwen3_moe"))
    output = tmp_path / "new"

    def interrupt(*_: object) -> None:
        assert list(output.glob("*.safetensors")), "shards are written by now"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("hotset.checkpoint.shrink._copy_texts", interrupt)
        code, _, err = run(capsys, "quantize", plain.folder, "-o", output)
    assert code == 130 and err.endswith("error: interrupted\n")
    assert list(output.iterdir()) == []
    code, _, _ = run(capsys, "quantize", plain.folder, "-o", output)
    assert code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_one_that_is_told_to_end_leaves_nothing(
    number: signal.Signals,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after Ctrl-C, however often it is told."""
    plain = make_family("qwen3_moe", tmp_path / "plain", config=config_of("qwen3_moe"))
    output = tmp_path / "new"
    outside: list[int] = []

    def note(received: int, _: object) -> None:
        outside.append(received)

    def tell(*_: object) -> None:
        assert list(output.glob("*.safetensors")), "shards are written by now"
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)

    before = signal.signal(number, note)
    try:
        with monkeypatch.context() as patched:
            patched.setattr("hotset.checkpoint.shrink._copy_texts", tell)
            code, _, err = run(capsys, "quantize", plain.folder, "-o", output)
        assert code == 128 + number and err.endswith(f"error: ended by {number.name}\n")
        assert list(output.iterdir()) == []
        assert signal.getsignal(number) is note and not outside
        assert run(capsys, "quantize", plain.folder, "-o", output)[0] == 0
    finally:
        signal.signal(number, before)


def test_signals_are_left_alone_under_nohup_and_in_other_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_family("qwen3_moe", tmp_path / "plain", config=config_of("qwen3_moe"))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def hang_up(*_: object) -> None:
        signal.raise_signal(signal.SIGHUP)

    try:
        with monkeypatch.context() as patched:
            patched.setattr("hotset.checkpoint.shrink._copy_texts", hang_up)
            code, _, _ = run(capsys, "quantize", plain.folder, "-o", tmp_path / "new")
        assert code == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(
            run(capsys, "quantize", plain.folder, "-o", tmp_path / "other")[0]
        )
    )
    thread.start()
    thread.join()
    assert codes == [0]


def test_a_folder_that_takes_no_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is quantised."""
    plain = make_family("qwen3_moe", tmp_path / "plain", config=config_of("qwen3_moe"))

    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    code, _, err = run(capsys, "quantize", plain.folder, "-o", tmp_path / "new")
    assert code == 2 and "cannot be made: Permission denied" in err


def test_names_on_the_command_line_are_those_of_the_formats() -> None:
    assert set(FORMATS) == set(TARGETS)


def test_int4_is_what_compressed_tensors_writes(shared: Path) -> None:
    """Bit for bit: the shared checkpoint was made of these weights by that library."""
    name = "model.layers.2.mlp.experts.5"
    pocket = load_file(shared / "models" / "pocket" / "model.safetensors")
    theirs = load_file(shared / "models" / "quantised" / "ct-int4" / "model.safetensors")
    for projection in ("gate_proj", "up_proj", "down_proj"):
        ours = quantise(pocket[f"{name}.{projection}.weight"], "int4")
        for suffix, tensor in ours.items():
            assert torch.equal(tensor, theirs[f"{name}.{projection}.{suffix}"]), suffix


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("factor", [1e-33, 1e-36, 1e6])
def test_weights_that_would_not_load_are_refused(
    target: str, factor: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the loader refuses their scales, or because these overflow."""
    plain = make_family("qwen3_moe", tmp_path / "plain", config=config_of("qwen3_moe"))
    scale_expert(plain.folder, factor)
    output = tmp_path / "new"
    code, _, err = run(capsys, "quantize", plain.folder, "--format", target, "-o", output)
    assert code == 1
    assert "`model.layers.1.mlp.experts.2." in err and f"cannot be written in {target}" in err
    assert "7.89e-31 to " in err and "at most 16384" in err  # 2^-100, 2^14
    assert list(output.iterdir()) == []


@pytest.mark.parametrize("target", FORMATS)
def test_an_expert_of_zeros_is_written_and_loads(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_family("qwen3_moe", tmp_path / "plain", config=config_of("qwen3_moe"))
    scale_expert(plain.folder, 0)
    output = tmp_path / "new"
    assert run(capsys, "quantize", plain.folder, "--format", target, "-o", output)[0] == 0
    packed = Family(output, CheckpointWeights(str(output), dtype="float32"))
    with packed.engine() as engine:
        assert check_records(engine, packed.source).ok


def test_one_expert_of_gpt_oss_that_would_not_load_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_family("gpt_oss", tmp_path / "plain", config=config_of("gpt_oss"))
    scale_expert(plain.folder, 1e-33)
    output = tmp_path / "new"
    code, _, err = run(capsys, "quantize", plain.folder, "--format", "mxfp4", "-o", output)
    assert code == 1 and "`model.layers.1.mlp.experts.down_proj[2]`" in err
    assert list(output.iterdir()) == []


def scale_expert(folder: Path, factor: float) -> None:
    """Multiplies the matrices of expert 2 of layer 1, in one tensor with others or not."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    found = 0
    for name, tensor in tensors.items():
        if "layers.1." in name and "bias" not in name:
            if "experts.2." in name:
                tensor.mul_(factor)
                found += 1
            elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensor[2].mul_(factor)
                found += 1
    assert found
    save_file(tensors, file, metadata={"format": "pt"})
