"""Writes safetensors shards as a stream: the header first, then tensors as they are made.

All sizes are known before anything is made, so no more than one piece is in memory. Knows names,
dtypes and bytes; nothing of what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hotset.checkpoint.index import DTYPE_NAMES, INDEX_NAME

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Output:
    """A tensor to be written.

    Attributes:
        name: its key.
        dtype: as `TensorEntry` spells it.
        shape: row-major.
        nbytes: of both.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Piece:
    """Tensors that are made together and lie side by side.

    Attributes:
        outputs: in the order of their bytes.
        make: their bytes in that order, in as many contiguous CPU tensors as it likes.
    """

    outputs: tuple[Output, ...]
    make: Callable[[], Iterator[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)


def write_shards(
    folder: Path, pieces: Sequence[Piece], *, progress: Callable[[int], None] | None = None
) -> None:
    """Writes `model-00001-of-....safetensors` and, last, the index file.

    Args:
        folder: exists.
        pieces: in the order of the files.
        progress: told the bytes of each piece that is done.

    Raises:
        OSError: a file cannot be written.
    """
    shards = _deal(pieces)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, shard, progress)
        weight_map |= {output.name: file for piece in shard for output in piece.outputs}
    total = sum(piece.nbytes for piece in pieces)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _deal(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Shards of up to `MAX_SHARD_BYTES`; a larger piece has one of its own."""
    shards: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if shards[-1] and size + piece.nbytes > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += piece.nbytes
    return shards


def _write_shard(file: Path, shard: list[Piece], progress: Callable[[int], None] | None) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in (output for piece in shard for output in piece.outputs):
        begin, end = end, end + output.nbytes
        header[output.name] = {
            "dtype": DTYPE_NAMES[output.dtype],
            "shape": list(output.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for piece in shard:
            written = 0
            for tensor in piece.make():
                written += stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            assert written == piece.nbytes, (piece.outputs, written)
            if progress is not None:
                progress(piece.nbytes)
