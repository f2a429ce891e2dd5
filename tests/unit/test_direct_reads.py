"""Cold files are read past the page cache, to the byte; where that cannot be, through it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import empty_records, open_checkpoint, rewrite
from hotset.checkpoint import direct
from hotset.checkpoint.direct import DirectFile
from hotset.checkpoint.index import TensorEntry
from hotset.checkpoint.loader import load_experts
from hotset.checkpoint.reader import Range, ShardReader, memory_of
from hotset.core.errors import CheckpointError
from tiny import save_tiny, tiny_config

# Not a multiple of any block.
SIZE = 300_001


def evict(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    data = torch.randint(256, (SIZE,), dtype=torch.uint8).numpy().tobytes()
    (tmp_path / "file").write_bytes(data)
    return data


@pytest.fixture
def cold(tmp_path: Path, content: bytes) -> Iterator[DirectFile]:
    """A file that is not in the page cache."""
    path = tmp_path / "file"
    evict(path)
    descriptor = os.open(path, os.O_RDONLY)
    with DirectFile(path, descriptor) as opened:
        os.close(descriptor)
        if opened.is_cached(0, SIZE):
            pytest.skip("this file system keeps all files in memory, or knows no O_DIRECT")
        yield opened


@pytest.mark.parametrize(
    ("offset", "sizes"),
    [(0, [SIZE]), (1, [7, 4096, 1]), (4095, [2]), (8192, [4096]), (SIZE - 3, [1, 2])],
)
def test_any_bytes_into_any_pieces(
    cold: DirectFile, content: bytes, monkeypatch: pytest.MonkeyPatch, offset: int, sizes: list[int]
) -> None:
    for block in (4096, direct._BLOCK_BYTES):
        monkeypatch.setattr(direct, "_BLOCK_BYTES", block)
        pieces = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        assert cold.read(offset, [memory_of(piece) for piece in pieces]) == sum(sizes)
        got = torch.cat(pieces).numpy().tobytes()
        assert got == content[offset : offset + sum(sizes)]
        assert got != content[offset + 1 : offset + 1 + sum(sizes)]
    assert not cold.is_cached(0, SIZE), "nothing of it came into the page cache"


def test_a_file_ends(cold: DirectFile) -> None:
    piece = torch.zeros(100, dtype=torch.uint8)
    assert cold.read(SIZE - 10, [memory_of(piece)]) == 10
    assert cold.read(SIZE + 10_000, [memory_of(piece)]) == 0


def test_what_is_cached_is_known(cold: DirectFile, tmp_path: Path) -> None:
    (tmp_path / "file").read_bytes()
    assert cold.is_cached(0, SIZE) and cold.is_cached(SIZE - 1, 1)


@pytest.mark.parametrize("refuses", ["open", "read"])
def test_without_direct_reads_the_page_cache_serves(
    cold: DirectFile, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """As on a file system that knows no O_DIRECT, or a disk of larger blocks."""
    real_open, real_read = os.open, os.preadv
    direct_descriptors = set()

    def opens(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and refuses == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = real_open(path, flags)
        if flags & os.O_DIRECT:
            direct_descriptors.add(descriptor)
        return descriptor

    def reads(descriptor: int, views: list[memoryview], offset: int) -> int:
        if descriptor in direct_descriptors:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(descriptor, views, offset)

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "preadv", reads)
    file, piece = tmp_path / "file", torch.zeros(1000, dtype=torch.uint8)
    entry = TensorEntry("t", file, "uint8", (1000,), 77, 1000)
    with ShardReader() as reader:
        reader.read_all([Range(file, 77, memory_of(piece), entry)])
    assert piece.numpy().tobytes() == content[77:1077]
    assert len(direct_descriptors) == (refuses == "read")


@pytest.fixture
def mixtral(tmp_path: Path) -> tuple[Path, Any]:
    return tmp_path, save_tiny("mixtral", tmp_path, dtype=torch.bfloat16)


def records_of(folder: Path, **options: Any) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    opened = open_checkpoint(folder, tiny_config("mixtral"))
    records = empty_records(opened.params, torch.bfloat16)
    load_experts(opened.key_map, destination=lambda *key: records[key], **options)
    return records


@pytest.mark.parametrize("num_threads", [1, 3])
def test_cold_and_cached_files_fill_records_alike(
    mixtral: tuple[Path, Any], num_threads: int
) -> None:
    folder, _ = mixtral
    want = records_of(folder, keep_file_cache=True)
    for file in folder.glob("*.safetensors"):
        evict(file)
    got = records_of(folder, num_threads=num_threads)
    for key, fields in want.items():
        for name, field in fields.items():
            assert torch.equal(got[key][name].view(torch.int16), field.view(torch.int16))


def test_what_is_not_finite_in_a_cold_file_is_named(mixtral: tuple[Path, Any]) -> None:
    folder, _ = mixtral
    name = "model.layers.2.block_sparse_moe.experts.5.w2.weight"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = float("nan")

    rewrite(folder, edit)
    file = folder / "model.safetensors"
    evict(file)
    with pytest.raises(CheckpointError) as caught:
        records_of(folder)
    assert caught.value.message == f"tensor `{name}` in `{file}` holds NaN or Inf"
