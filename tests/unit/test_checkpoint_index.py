"""Headers of safetensors files: sound ones are read, damaged ones are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoints import save_shards
from hotset.checkpoint.index import INDEX_NAME, CheckpointIndex
from hotset.core.errors import CheckpointError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 5),
    "scalar": torch.tensor(7, dtype=torch.int64),
}


def write_raw(file: Path, header: object, data_bytes: int) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))


def one_tensor(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_entries_locate_the_bytes(tmp_path: Path, num_shards: int) -> None:
    save_shards(tmp_path, TENSORS, num_shards=num_shards)
    index = CheckpointIndex.read(tmp_path)
    assert set(index) == set(TENSORS)
    assert len(index.files) == num_shards
    assert index.total_bytes == 24 + 8 + 0 + 8
    for name, tensor in TENSORS.items():
        entry = index[name]
        assert (entry.shape, entry.dtype) == (tuple(tensor.shape), str(tensor.dtype)[6:])
        data = entry.file.read_bytes()[entry.offset : entry.offset + entry.nbytes]
        assert data == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_other_files_beside_the_shards_are_left_alone(tmp_path: Path) -> None:
    save_shards(tmp_path, TENSORS, num_shards=1)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not read")
    assert set(CheckpointIndex.read(tmp_path)) == set(TENSORS)


def test_shards_without_an_index_file(tmp_path: Path) -> None:
    save_shards(tmp_path, TENSORS, num_shards=3)
    (tmp_path / INDEX_NAME).unlink()
    assert set(CheckpointIndex.read(tmp_path)) == set(TENSORS)


def _truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def _truncate_in_header(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:20])


def _append(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes() + b"xx")


def _empty(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


def _pointer(folder: Path) -> None:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
    (folder / "model-00001-of-00002.safetensors").write_bytes(text)


def _web_page(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"<!DOCTYPE html><html>...")


def _directory(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.unlink()
    file.mkdir()


def _remove(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def _remove_all(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


def _repeat(folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    (folder / "model-00003-of-00002.safetensors").write_bytes(shard.read_bytes())
    (folder / INDEX_NAME).unlink()


def _edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / INDEX_NAME
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return edit


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

FOLDER_FAULTS = [
    (_truncate, "`{}/" + SECOND + "` is truncated: its header promises 144 bytes, it has 141"),
    (
        _truncate_in_header,
        "`{}/" + SECOND + "` is truncated: its header alone has 128 bytes, the file 20",
    ),
    (_append, "`{}/" + FIRST + "` has 154 bytes, 2 more than its header promises"),
    (_empty, "`{}/" + FIRST + "` is empty (0 bytes)"),
    (_pointer, "`{}/" + FIRST + "` is a Git LFS pointer, not the file itself"),
    (
        _web_page,
        "`{}/" + FIRST + "` is not a safetensors file: it begins with b'<!DOCTYPE html><html>...'",
    ),
    (_directory, "cannot read `{}/" + FIRST + "`: Is a directory"),
    (_remove, "`{}` lacks 1 of its 2 shards: `" + SECOND + "`"),
    (_remove_all, "no safetensors file in `{}`"),
    (
        _repeat,
        "tensor `a` is in both `{}/" + FIRST + "` and `{}/model-00003-of-00002.safetensors`",
    ),
    (
        _edit_index(lambda weight_map: weight_map.update(c=FIRST)),
        "tensors of `{}/" + INDEX_NAME + "` that are in no file (1): `c` (" + FIRST + ")",
    ),
    (
        _edit_index(lambda weight_map: weight_map.pop("a")),
        "tensors that `{}/" + INDEX_NAME + "` does not list (1): `a` (" + FIRST + ")",
    ),
    (
        _edit_index(lambda weight_map: weight_map.update(a=SECOND)),
        "`{}/" + INDEX_NAME + f"` puts tensor `a` in `{SECOND}`, it is in `{FIRST}`",
    ),
]


@pytest.mark.parametrize(("damage", "message"), FOLDER_FAULTS)
def test_a_damaged_folder_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    save_shards(tmp_path, TENSORS, num_shards=2)
    damage(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        CheckpointIndex.read(tmp_path)
    assert caught.value.message == message.replace("{}", str(tmp_path))
    assert caught.value.hint


HEADER_FAULTS = [
    (one_tensor(data_offsets=[0, 4]), 4, "tensor `a` of shape [2] and dtype float32 has 4 bytes"),
    (one_tensor(shape=[-2]), 8, "tensor `a` of shape [-2] and dtype float32 has 8 bytes"),
    (one_tensor(data_offsets=[4, 12]), 12, "data of tensor `a` begins at byte 4, expected 0"),
    (one_tensor(dtype="F12"), 8, "has unknown dtype `F12`"),
    (one_tensor(shape="two"), 8, "its header is not understood"),
    ({"a": {"dtype": "F32"}}, 8, "its header is not understood"),
    ([1, 2], 8, "its header is not understood"),
    (
        one_tensor() | {"b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        12,
        "data of tensor `b` begins at byte 4, expected 8",
    ),
]


@pytest.mark.parametrize(("header", "data_bytes", "message"), HEADER_FAULTS)
def test_a_damaged_header_is_refused(
    tmp_path: Path, header: object, data_bytes: int, message: str
) -> None:
    file = tmp_path / "model.safetensors"
    write_raw(file, header, data_bytes)
    with pytest.raises(CheckpointError) as caught:
        CheckpointIndex.read(tmp_path)
    assert message in caught.value.message
    assert str(file) in caught.value.message


def test_an_implausible_header_length_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        CheckpointIndex.read(tmp_path)


def test_a_damaged_index_file_is_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, TENSORS, num_shards=2)
    (tmp_path / INDEX_NAME).write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match="no readable `weight_map`"):
        CheckpointIndex.read(tmp_path)


def test_sub_byte_dtypes_are_measured_in_bits(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F4", "shape": [3, 4], "data_offsets": [0, 6]}}
    write_raw(tmp_path / "model.safetensors", header, 6)
    entry = CheckpointIndex.read(tmp_path)["a"]
    assert (entry.dtype, entry.nbytes) == ("float4_e2m1", 6)
