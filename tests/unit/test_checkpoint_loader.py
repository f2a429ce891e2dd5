"""Experts stream into records bit by bit as the stock model has them, or loading says why not."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import (
    Opened,
    Records,
    empty_records,
    expected_field,
    open_checkpoint,
    rewrite,
    stock_experts,
)
from hotset.checkpoint import jobs, loader
from hotset.checkpoint.finite import is_finite
from hotset.checkpoint.loader import load_experts
from hotset.checkpoint.reader import Range, ShardReader
from hotset.checkpoint.resident import resident_state_dict
from hotset.checkpoint.validate import check_complete, check_materialised
from hotset.core.errors import CheckpointError
from hotset.models.seam import hotset_class
from tiny import TINY_MODEL_TYPES, save_tiny, tiny_config

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load(opened: Opened, dtype: torch.dtype, **options: Any) -> Records:
    """Loads into NaN-filled records: what is not written cannot equal anything."""
    records = empty_records(opened.params, dtype)
    load_experts(
        opened.key_map, destination=lambda layer, expert: records[layer, expert], **options
    )
    return records


def differences(opened: Opened, records: Records, stock: Any, dtype: torch.dtype) -> list[str]:
    """Fields that are not bitwise what the stock model holds, cast to `dtype`."""
    modules = stock_experts(stock)
    return [
        f"{param.full_name} of expert {expert}"
        for param in opened.params
        for expert in range(param.shape[0])
        if not torch.equal(
            records[param.layer, expert][param.field],
            expected_field(param, getattr(modules[param.layer], param.name), expert).to(dtype),
        )
    ]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("mixtral")
    return folder, save_tiny("mixtral", folder)


@pytest.mark.parametrize("model_type", TINY_MODEL_TYPES)
def test_records_equal_the_stock_parameters(tmp_path: Path, model_type: str) -> None:
    stock = save_tiny(model_type, tmp_path, dtype=torch.bfloat16, max_shard_size=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    opened = open_checkpoint(tmp_path, tiny_config(model_type))
    check_complete(opened.key_map, model=opened.model)
    records = load(opened, torch.bfloat16)
    assert not differences(opened, records, stock, torch.bfloat16)
    # The control: one element, of one expert, in one field.
    param = opened.params[-1]
    records[param.layer, 3][param.field].view(torch.int16)[..., -1] ^= 1
    assert differences(opened, records, stock, torch.bfloat16) == [f"{param.full_name} of expert 3"]


# Layouts: per expert, fused, transposed and interleaved with biases, converted by the library.
@pytest.mark.parametrize("model_type", ["mixtral", "granitemoe", "gpt_oss", "inkling2_text"])
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
    ],
)
def test_casts_round_once(
    tmp_path: Path, model_type: str, stored: torch.dtype, wanted: torch.dtype
) -> None:
    stock = save_tiny(model_type, tmp_path, dtype=stored)
    opened = open_checkpoint(tmp_path, tiny_config(model_type))
    assert not differences(opened, load(opened, wanted), stock, wanted)


@pytest.mark.parametrize("num_shards", [1, 7])
@pytest.mark.parametrize(("num_threads", "batch_bytes"), [(1, 2**25), (4, 2**25), (2, 10_000)])
def test_sharding_and_threads_do_not_matter(
    mixtral: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_shards: int,
    num_threads: int,
    batch_bytes: int,
) -> None:
    """One file without an index, or an expert's pieces dealt out to seven; all jobs in one batch,
    or two at a time."""
    monkeypatch.setattr(loader, "_BATCH_BYTES", batch_bytes)
    folder, stock = mixtral
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: None, num_shards=num_shards)
    opened = open_checkpoint(tmp_path, tiny_config("mixtral"))
    records = load(opened, torch.float32, num_threads=num_threads)
    assert not differences(opened, records, stock, torch.float32)


def test_the_librarys_converter_makes_the_same_bytes(
    mixtral: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading rows straight into place against running the converter that it stands for."""
    folder, stock = mixtral
    monkeypatch.setattr(jobs, "stacks_rows", lambda converter: False)
    opened = open_checkpoint(folder, tiny_config("mixtral"))
    assert not differences(opened, load(opened, torch.float32), stock, torch.float32)


def test_disks_are_read_forwards_and_all_bytes_once(mixtral: tuple[Path, Any]) -> None:
    folder, _ = mixtral
    opened = open_checkpoint(folder, tiny_config("mixtral"))
    reads: list[tuple[Path, int, int]] = []

    class Recorder(ShardReader):
        def read_all(self, ranges: Iterable[Range]) -> None:
            ranges = list(ranges)
            reads.extend((one.file, one.offset, len(one.memory)) for one in ranges)
            super().read_all(ranges)

    seen: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "ShardReader", Recorder)
        records = empty_records(opened.params, torch.float32)
        report = load_experts(
            opened.key_map,
            destination=lambda layer, expert: records[layer, expert],
            progress=lambda done, total: seen.append((done, total)),
            num_threads=1,
        )
    entries = [piece.entry for piece in opened.key_map.pieces]
    assert reads == sorted(reads)
    assert set(reads) == {(entry.file, entry.offset, entry.nbytes) for entry in entries}
    assert len(reads) == len(entries)
    assert report.num_bytes == opened.key_map.expert_bytes
    assert report.num_records == 4 * 8
    assert seen[-1] == (report.num_bytes, report.num_bytes)


def _set(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return edit


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("mixtral", "model.layers.2.block_sparse_moe.experts.5.w2.weight"),
        ("granitemoe", "model.layers.0.block_sparse_moe.output_linear.weight"),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj_bias"),
        ("inkling2_text", "model.llm.layers.1.mlp.experts.w13_weight"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_named(
    tmp_path: Path, model_type: str, name: str, value: float
) -> None:
    save_tiny(model_type, tmp_path, max_shard_size="1GB")
    rewrite(tmp_path, _set(name, value))
    opened = open_checkpoint(tmp_path, tiny_config(model_type))
    with pytest.raises(CheckpointError) as caught:
        load(opened, torch.float32)
    file = tmp_path / "model.safetensors"
    assert caught.value.message == f"tensor `{name}` in `{file}` holds NaN or Inf"


def test_a_value_that_does_not_fit_the_dtype_is_named(
    mixtral: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, _ = mixtral
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    name = "model.layers.2.block_sparse_moe.experts.5.w2.weight"
    rewrite(tmp_path, _set(name, 1e6))
    opened = open_checkpoint(tmp_path, tiny_config("mixtral"))
    load(opened, torch.bfloat16)
    with pytest.raises(CheckpointError) as caught:
        load(opened, torch.float16)
    file = tmp_path / "model.safetensors"
    assert caught.value.message == (
        f"tensor `{name}` in `{file}` has values that float16 cannot hold"
    )
    assert "--dtype float32" in str(caught.value)


def test_of_several_faults_the_first_in_the_file_is_said(
    mixtral: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, _ = mixtral
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: {n: t * float("nan") for n, t in tensors.items()})
    opened = open_checkpoint(tmp_path, tiny_config("mixtral"))
    first = min((piece.entry for piece in opened.key_map.pieces), key=lambda entry: entry.offset)
    for _ in range(5):
        with pytest.raises(CheckpointError, match=f"`{first.name}`"):
            load(opened, torch.float32, num_threads=4)


def _open_shards(folder: Path) -> list[str]:
    """Files of a folder that this process has open."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return [link for link in links if link.startswith(str(folder))]


def test_a_file_that_shrinks_after_it_was_checked(
    mixtral: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, _ = mixtral
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: None)
    opened = open_checkpoint(tmp_path, tiny_config("mixtral"))
    file = tmp_path / "model.safetensors"
    last = max((piece.entry for piece in opened.key_map.pieces), key=lambda entry: entry.offset)
    os.truncate(file, last.offset + 100)
    with pytest.raises(CheckpointError) as caught:
        load(opened, torch.float32)
    assert caught.value.message == (
        f"`{file}` ends early: expected {last.nbytes} bytes from byte {last.offset} on, got 100"
    )
    assert not _open_shards(tmp_path)


def test_a_file_that_vanishes_is_said(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = mixtral
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, lambda tensors: None)
    opened = open_checkpoint(tmp_path, tiny_config("mixtral"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*: No such file or directory"):
        load(opened, torch.float32)


def test_ctrl_c_leaves_no_thread_and_no_file(mixtral: tuple[Path, Any]) -> None:
    """Records may be unmapped as soon as loading has raised: nobody may write to them then."""
    folder, _ = mixtral
    opened = open_checkpoint(folder, tiny_config("mixtral"))
    records = empty_records(opened.params, torch.float32)
    num_calls = 0

    def slow(layer: int, expert: int) -> dict[str, torch.Tensor]:
        nonlocal num_calls
        num_calls += 1
        time.sleep(0.01)
        return records[layer, expert]

    def interrupted(done: int, total: int) -> None:
        assert done < total
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_experts(opened.key_map, destination=slow, progress=interrupted, num_threads=2)
    assert not [t for t in threading.enumerate() if t.name.startswith("load-experts")]
    assert not _open_shards(folder)
    calls_at_return = num_calls
    time.sleep(0.05)
    assert num_calls == calls_at_return < len(opened.key_map.pieces)


# A plain model, a converted convolution, a composite checkpoint, integer buffers, MLA.
@pytest.mark.parametrize(
    "model_type", ["mixtral", "kimi_linear", "qwen3_5_moe", "deepseek_v4", "deepseek_v3"]
)
def test_resident_weights_load_through_the_library(tmp_path: Path, model_type: str) -> None:
    stock = save_tiny(model_type, tmp_path)
    opened = open_checkpoint(tmp_path, tiny_config(model_type))
    cls = hotset_class(type(opened.model).__base__)
    with ShardReader() as reader:
        model, info = cls.from_pretrained(
            None,
            config=opened.model.config,
            state_dict=resident_state_dict(opened.key_map, reader, dtype=torch.float32),
            dtype=torch.float32,
            experts_implementation="hotset",
            output_loading_info=True,
        )
    assert not any(info.values())
    check_materialised(model)
    want = {
        name.replace("model.language_model.", "model."): t for name, t in stock.state_dict().items()
    }
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, want[name]), name


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_conv1d.weight"])
def test_a_resident_weight_that_is_not_finite_is_named(tmp_path: Path, name: str) -> None:
    """Whether the library only places it or feeds it to a converter."""
    save_tiny("kimi_linear", tmp_path)
    rewrite(tmp_path, _set(name, float("nan")))
    opened = open_checkpoint(tmp_path, tiny_config("kimi_linear"))
    with ShardReader() as reader, pytest.raises(CheckpointError) as caught:
        hotset_class(type(opened.model).__base__).from_pretrained(
            None,
            config=opened.model.config,
            state_dict=resident_state_dict(opened.key_map, reader, dtype=torch.float32),
            dtype=torch.float32,
        )
    file = tmp_path / "model.safetensors"
    assert caught.value.message == f"tensor `{name}` in `{file}` holds NaN or Inf"


def test_a_closed_reader_opens_nothing(mixtral: tuple[Path, Any]) -> None:
    """The library leaves reading threads behind when loading fails."""
    folder, _ = mixtral
    opened = open_checkpoint(folder, tiny_config("mixtral"))
    with ShardReader() as reader:
        tensors = resident_state_dict(opened.key_map, reader, dtype=torch.float32)
        assert tensors["lm_head.weight"][...].shape == tensors["lm_head.weight"].shape
    with pytest.raises(ValueError, match="closed"):
        tensors["lm_head.weight"][...]
    assert not _open_shards(folder)


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_means_every_bit_pattern(dtype: torch.dtype) -> None:
    """Against torch, on all 65,536 upper halves of a float and on the edges of the range."""
    width = dtype.itemsize * 8
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int64) << (width - 16)
    integer = {16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    values = upper.to(integer).view(dtype)
    mask = torch.isfinite(values)
    assert is_finite(values[mask])
    wrong = [v for v in values[~mask] if is_finite(torch.stack([values[mask][0], v]))]
    assert not wrong
    limits = torch.finfo(dtype)
    assert is_finite(torch.tensor([limits.max, limits.min, limits.tiny, -0.0], dtype=dtype))
    assert is_finite(torch.zeros(0, dtype=dtype))
    assert not is_finite(torch.full((4, 4), float("-inf"), dtype=dtype).T[::2])
