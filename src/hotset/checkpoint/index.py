"""What lies where in a folder of safetensors files, read from their headers alone.

Knows names, dtypes, shapes and byte ranges, and refuses a folder whose files do not hold exactly
what their headers promise. Standard library only: no tensor is read, nothing is mapped, and
nothing is known of what the names mean.

A safetensors file is: 8 bytes little-endian header length, that many bytes of JSON
`{name: {dtype, shape, data_offsets: [begin, end]}}`, then the data, which the ranges cover
without gap or overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hotset.checkpoint.files import AGAIN_HINT, LFS_POINTER, read_json, readable, refuse_lfs_pointer
from hotset.core.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"

# The format's own limit, and far above the largest published header.
MAX_HEADER_BYTES = 100_000_000

_MIXED_HINT = "index and shards must come from the same checkpoint; download them together"

# What a damaged header raises: numbers beyond all integers and nesting beyond all depth among it.
_NOT_A_HEADER = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)

# safetensors name -> (name used everywhere here, bits of one element)
_DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 64),
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F6_E3M2": ("float6_e3m2", 6),
    "F6_E2M3": ("float6_e2m3", 6),
    "F4": ("float4_e2m1", 4),
    "I64": ("int64", 64),
    "I32": ("int32", 32),
    "I16": ("int16", 16),
    "I8": ("int8", 8),
    "U64": ("uint64", 64),
    "U32": ("uint32", 32),
    "U16": ("uint16", 16),
    "U8": ("uint8", 8),
    "BOOL": ("bool", 8),
    "C64": ("complex64", 64),
}

# The other way round, for those who write.
DTYPE_NAMES = {ours: theirs for theirs, (ours, _) in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        name: its key.
        file: the file that holds it.
        dtype: torch's name of its dtype, e.g. `bfloat16`.
        shape: row-major.
        offset: first byte, counted from the start of the file.
        nbytes: shape x dtype.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class CheckpointIndex(Mapping[str, TensorEntry]):
    """All tensors of a checkpoint by name, in file order."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = dict(entries)

    @classmethod
    def read(cls, folder: Path) -> CheckpointIndex:
        """Reads the header of every shard and checks that the files agree with each other.

        With `model.safetensors.index.json` the shards are those that it names; without, all files
        `model*.safetensors`, or all `*.safetensors` where none is called so.

        Raises:
            CheckpointError: no shard; shards or tensors missing; a file empty, truncated, too long,
                unreadable, not safetensors, or a Git LFS pointer; a tensor in two files.
        """
        folder = Path(folder)
        weight_map = _read_weight_map(folder)
        files = _listed_shards(folder, weight_map) if weight_map else _found_shards(folder)
        entries: dict[str, TensorEntry] = {}
        for file in files:
            for entry in read_header(file):
                earlier = entries.setdefault(entry.name, entry)
                if earlier is not entry:
                    raise CheckpointError(
                        f"tensor `{entry.name}` is in both `{earlier.file}` and `{file}`",
                        hint="remove the file that does not belong to this checkpoint",
                    )
        if weight_map:
            _check_weight_map(folder, weight_map, entries)
        return cls(entries)

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def files(self) -> tuple[Path, ...]:
        """The shards, each once, in reading order."""
        return tuple(dict.fromkeys(entry.file for entry in self._entries.values()))

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for entry in self._entries.values())


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one file, in the order of their data; the file's size is checked.

    Raises:
        CheckpointError: see `CheckpointIndex.read`; the message names the file.
    """
    with readable(file), file.open("rb") as stream:
        file_bytes = stream.seek(0, 2)
        stream.seek(0)
        start = stream.read(len(LFS_POINTER))
        header_bytes = _header_bytes(file, start, file_bytes)
        stream.seek(8)
        text = stream.read(header_bytes)
    entries = parse_header(file, text, data_start=8 + header_bytes)
    end = entries[-1].offset + entries[-1].nbytes if entries else 8 + header_bytes
    if file_bytes < end:
        raise CheckpointError(
            f"`{file}` is truncated: its header promises {end} bytes, it has {file_bytes}",
            hint=AGAIN_HINT,
        )
    if file_bytes > end:
        raise CheckpointError(
            f"`{file}` has {file_bytes} bytes, {file_bytes - end} more than its header promises",
            hint=AGAIN_HINT,
        )
    return entries


def _header_bytes(file: Path, start: bytes, file_bytes: int) -> int:
    """Length of the JSON header, from the first bytes of the file."""
    if not file_bytes:
        raise CheckpointError(f"`{file}` is empty (0 bytes)", hint=AGAIN_HINT)
    refuse_lfs_pointer(file, start)
    header_bytes = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise CheckpointError(
            f"`{file}` is not a safetensors file: it begins with {start[:24]!r}", hint=AGAIN_HINT
        )
    if 8 + header_bytes > file_bytes:
        raise CheckpointError(
            f"`{file}` is truncated: its header alone has {8 + header_bytes} bytes, "
            f"the file {file_bytes}",
            hint=AGAIN_HINT,
        )
    return header_bytes


def parse_header(file: Path, text: bytes, *, data_start: int) -> list[TensorEntry]:
    """Turns a header's JSON into entries, in the order of their data.

    Args:
        file: for the entries and for messages.
        text: the JSON.
        data_start: where the data begins in the file, bytes.

    Raises:
        CheckpointError: not JSON, an unknown dtype, a size that is not shape x dtype, or byte
            ranges with a gap or an overlap.
    """
    try:
        header = json.loads(text)
        items = [(name, spec) for name, spec in header.items() if name != "__metadata__"]
        items.sort(key=lambda item: tuple(item[1]["data_offsets"]))
        entries, position = [], 0
        for name, spec in items:
            entry = _parse_tensor(file, name, spec, data_start)
            if entry.offset != data_start + position:
                raise CheckpointError(
                    f"`{file}` is damaged: data of tensor `{name}` begins at byte "
                    f"{entry.offset - data_start}, expected {position}",
                    hint=AGAIN_HINT,
                )
            entries.append(entry)
            position += entry.nbytes
    except _NOT_A_HEADER as error:
        raise CheckpointError(
            f"`{file}` is damaged: its header is not understood", hint=AGAIN_HINT
        ) from error
    return entries


def _parse_tensor(file: Path, name: str, spec: dict[str, Any], data_start: int) -> TensorEntry:
    if spec["dtype"] not in _DTYPES:
        raise CheckpointError(
            f"tensor `{name}` in `{file}` has unknown dtype `{spec['dtype']}`",
            hint="use a checkpoint in BF16, FP16 or FP32",
        )
    dtype, bits = _DTYPES[spec["dtype"]]
    shape = tuple(int(size) for size in spec["shape"])
    begin, end = (int(offset) for offset in spec["data_offsets"])
    if min(shape, default=0) < 0 or (end - begin) * 8 != prod(shape) * bits:
        raise CheckpointError(
            f"`{file}` is damaged: tensor `{name}` of shape {list(shape)} and dtype {dtype} "
            f"has {end - begin} bytes",
            hint=AGAIN_HINT,
        )
    return TensorEntry(name, file, dtype, shape, data_start + begin, end - begin)


def _read_weight_map(folder: Path) -> dict[str, str]:
    """tensor -> shard from the index file; empty where there is none."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return {}
    try:
        weight_map = read_json(path)["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"`{path}` is damaged: no readable `weight_map`", hint=AGAIN_HINT
        ) from error


def _listed_shards(folder: Path, weight_map: dict[str, str]) -> list[Path]:
    files = [folder / shard for shard in sorted(set(weight_map.values()))]
    missing = [f"`{file.name[:100]}`" for file in files if not _exists(file)]
    if missing:
        raise CheckpointError(
            f"`{folder}` lacks {len(missing)} of its {len(files)} shards: {some(missing)}",
            hint="download the missing files",
        )
    return files


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:  # no file can have this name
        return False


def _found_shards(folder: Path) -> list[Path]:
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"no safetensors file in `{folder}`", hint="download or copy the weights as well"
        )
    return files


def _check_weight_map(
    folder: Path, weight_map: dict[str, str], entries: dict[str, TensorEntry]
) -> None:
    """The index file and the headers must tell the same story."""
    for name, shard in weight_map.items():
        if name in entries and entries[name].file.name != Path(shard).name:
            raise CheckpointError(
                f"`{folder / INDEX_NAME}` puts tensor `{name}` in `{shard}`, "
                f"it is in `{entries[name].file.name}`",
                hint=_MIXED_HINT,
            )
    absent = [f"`{name}` ({shard})" for name, shard in weight_map.items() if name not in entries]
    if absent:
        raise CheckpointError(
            f"tensors of `{folder / INDEX_NAME}` that are in no file ({len(absent)}): "
            f"{some(absent)}",
            hint=_MIXED_HINT,
        )
    unlisted = [
        f"`{name}` ({entry.file.name})" for name, entry in entries.items() if name not in weight_map
    ]
    if unlisted:
        raise CheckpointError(
            f"tensors that `{folder / INDEX_NAME}` does not list ({len(unlisted)}): "
            f"{some(unlisted)}",
            hint=_MIXED_HINT,
        )


def some(items: list[str], most: int = 5) -> str:
    """Up to `most` items of a list for a message, then how many more there are."""
    listed = ", ".join(items[:most])
    return listed if len(items) <= most else f"{listed} and {len(items) - most} more"
