"""Packs quantised matrices into records: codes, scales, zero points.

Codes and scales that the file has as the record wants them are read straight into it; all else is
read beside it and rearranged. What the rearrangement is belongs to the format; where rows go is
decided here. Many matrices are alike, so what is asked of one is asked of all of them together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hotset.checkpoint.formats.base import MatrixFormat
from hotset.checkpoint.jobs import Job
from hotset.checkpoint.mapping import ExpertPiece
from hotset.checkpoint.packed import (
    Memories,
    PackedEntry,
    check_scales,
    is_single,
    naming,
    numbers_of,
    read_packed,
)
from hotset.checkpoint.reader import Range, ShardReader
from hotset.checkpoint.scratch import Scratch, copy_bits
from hotset.core.errors import CheckpointError

Fields = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Place:
    """Where one tensor of a matrix is read to.

    Attributes:
        ending: of the record field that has its bytes; `None` where it is read beside the record.
        start, nbytes: bytes of that field, or as many beside it.
        dtype, shape: of the tensor, of one expert.
        numbers: what must not be NaN or Inf; see `reader.Range`.
    """

    ending: str | None
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    numbers: torch.dtype | None


# A format, and the dtype and shape of each part.
_Kind = tuple[MatrixFormat, tuple[tuple[str, tuple[int, ...]], ...]]


class _Alike:
    """What all matrices of one kind have in common: the same half of the same field, in files of
    the same format and dtypes.

    Attributes:
        kind: the same of other halves and fields of that format and shape.
        places: by suffix, in the order of an entry's parts.
    """

    def __init__(self, job: Job, piece: ExpertPiece, fields: Fields, *, is_moved: bool) -> None:
        entry = _packed(piece)
        self._parts, self._format = list(entry.parts.values()), entry.format
        self._is_moved = is_moved
        self.kind: _Kind = (entry.format, tuple((part.dtype, part.shape) for part in self._parts))
        self.places = {
            suffix: _place(job, piece, fields, suffix, is_moved=is_moved) for suffix in entry.parts
        }
        self._beside = [name for name, place in self.places.items() if place.ending is None]
        # A scale of the whole matrix, where nothing else is beside the record.
        self.single: str | None = None
        if len(self._beside) == 1 and f"{job.piece.param.field}_global" in fields:
            (suffix,) = self._beside
            self.single = suffix if is_single(entry.parts[suffix]) else None
        # All that may be beside the record without a part in it, and the bytes that it must have.
        self._shape_bytes = b""
        if self._beside == [entry.format.says_shape]:
            dtype = self.places[self._beside[0]].dtype
            self._shape_bytes = torch.tensor(self._format.shape, dtype=dtype).numpy().tobytes()

    def is_in_place(self, memories: Memories) -> bool:
        """Whether reading has filled all of the record's fields, and there is nothing to refuse."""
        if not self._beside:
            return True
        return bool(self._shape_bytes) and memories[self._beside[0]] == self._shape_bytes

    def has(self, entry: PackedEntry, *, is_moved: bool) -> bool:
        """Whether a matrix of the same half and field is one of these."""
        return (
            entry.format == self._format
            and is_moved == self._is_moved
            and list(entry.parts) == list(self.places)
            and all(
                one.dtype == other.dtype and one.shape == other.shape
                for one, other in zip(entry.parts.values(), self._parts, strict=True)
            )
        )


class Matrix(NamedTuple):
    """One quantised matrix on its way into a record.

    Attributes:
        job, piece, fields: what it is, and the record's fields.
        alike: what it has in common with others.
        memories: of its tensors by suffix.
        row_order: in which order its rows go, where they do not go as they are.
    """

    job: Job
    piece: ExpertPiece
    fields: Fields
    alike: _Alike
    memories: Memories
    row_order: torch.Tensor | None

    @property
    def entry(self) -> PackedEntry:
        return _packed(self.piece)

    @property
    def tensors(self) -> Fields:
        """By suffix."""
        return {
            suffix: torch.frombuffer(memory, dtype=place.dtype).view(place.shape)
            for (suffix, place), memory in zip(
                self.alike.places.items(), self.memories.values(), strict=True
            )
        }


class Packing:
    """Packs matrices, many at a time: `open` them, read what it asks for, then `finish`.

    Args:
        reader: of the files.
    """

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self._alike: dict[tuple[str, int], _Alike] = {}

    def open(
        self, job: Job, fields: Fields, field_memory: dict[str, memoryview], scratch: Scratch
    ) -> tuple[list[Matrix], list[Range]]:
        """Where the matrices of one projection are read to.

        Args:
            job: of kind `PACK`.
            fields: writable views of the record's fields, in host memory.
            field_memory: the same as memory.
            scratch: for what is read beside them.

        Raises:
            CheckpointError: the order of its rows cannot be read.
        """
        name = job.piece.param.field
        order = None if job.row_order is None else _column_order(self._reader, job.row_order)
        matrices: list[Matrix] = []
        ranges: list[Range] = []
        for piece in job.pieces:
            alike = self._alike_of(job, piece, fields, is_moved=order is not None)
            index = job.expert if piece.expert is None else 0
            memories: dict[str, memoryview] = {}
            for (suffix, place), part in zip(
                alike.places.items(), _packed(piece).parts.values(), strict=True
            ):
                if place.ending is None:
                    memory = scratch.memory(place.nbytes)
                else:
                    field = field_memory[name + place.ending]
                    memory = field[place.start : place.start + place.nbytes]
                memories[suffix] = memory
                offset = part.offset + index * place.nbytes
                ranges.append(Range(part.file, offset, memory, part, place.numbers))
            matrices.append(Matrix(job, piece, fields, alike, memories, order))
        return matrices, ranges

    @staticmethod
    def finish(matrices: Iterable[Matrix]) -> None:
        """Checks what was read, and rearranges what is not in its place yet.

        Raises:
            CheckpointError: values that are no weights'; names tensor and file.
        """
        groups: dict[_Kind, list[Matrix]] = defaultdict(list)
        for one in matrices:
            groups[one.alike.kind].append(one)
        for group in groups.values():
            check_scales([(one.entry, one.memories) for one in group])
            singles: dict[str, list[Matrix]] = defaultdict(list)
            for one in group:
                if one.alike.single is not None:
                    singles[one.alike.single].append(one)
                elif not one.alike.is_in_place(one.memories):
                    _rearrange(one)
            for suffix, alike in singles.items():
                _place_globals(suffix, alike)

    def _alike_of(self, job: Job, piece: ExpertPiece, fields: Fields, *, is_moved: bool) -> _Alike:
        key = (piece.param.full_name, piece.part)
        known = self._alike.get(key)
        if known is None or not known.has(_packed(piece), is_moved=is_moved):
            known = self._alike[key] = _Alike(job, piece, fields, is_moved=is_moved)
        return known


def _packed(piece: ExpertPiece) -> PackedEntry:
    assert isinstance(piece.entry, PackedEntry)
    return piece.entry


def _place(job: Job, piece: ExpertPiece, fields: Fields, suffix: str, *, is_moved: bool) -> _Place:
    """Into the record where a tensor's rows are the record's, else beside."""
    entry = _packed(piece)
    part, format_ = entry.parts[suffix], entry.format
    dtype: torch.dtype = getattr(torch, part.dtype)
    shape = part.shape if piece.expert is not None else part.shape[1:]
    nbytes, numbers = torch.Size(shape).numel() * dtype.itemsize, numbers_of(entry, suffix)
    ending = None if is_moved else format_.as_stored.get(suffix)
    if ending is not None:
        field = fields[job.piece.param.field + ending]
        rows = half(field, job, piece)
        if rows.is_contiguous() and rows.nbytes == nbytes:
            return _Place(ending, rows.data_ptr() - field.data_ptr(), nbytes, dtype, shape, numbers)
    return _Place(None, 0, nbytes, dtype, shape, numbers)


def _rearrange(one: Matrix) -> None:
    """Copies to the record what was read beside it."""
    job, name, format_ = one.job, one.job.piece.param.field, one.entry.format
    done = {place.ending for place in one.alike.places.values() if place.ending is not None}
    tensors = one.tensors
    made = _companions(one.entry, tensors)
    if "" not in done:
        made[""] = format_.codes(tensors)
    order = made.pop("_order", None)
    if order is not None:
        _place_order(order, one.fields, name, one.entry, first=one.piece is job.piece)
    for ending in made.keys() - done:
        rows = made[ending] if one.row_order is None else made[ending][one.row_order]
        target = half(one.fields[name + ending], job, one.piece)
        copy_bits(rows.reshape(target.shape), target)


def _place_globals(suffix: str, matrices: list[Matrix]) -> None:
    """As `_rearrange`, of matrices of one kind that lack a scale of the whole and nothing else."""
    first = matrices[0]
    read = [torch.frombuffer(one.memories[suffix], dtype=torch.float32) for one in matrices]
    made = _companions(first.entry, {**first.tensors, suffix: torch.cat(read)})["_global"]
    # Every float32 is a Python number.
    for one, value in zip(matrices, made.tolist(), strict=True):
        field = one.fields[one.job.piece.param.field + "_global"]
        half(field, one.job, one.piece).fill_(value)


def half(field: torch.Tensor, job: Job, piece: ExpertPiece) -> torch.Tensor:
    """Where the rows of a piece go: a part of the field's rows, or all, seen in the piece's order.

    Of an interleaved tensor of all experts [2I, ...] the field is seen as [I, 2, ...].
    """
    if piece.expert is None:
        both = piece.param.interleaved
        return field.unflatten(0, (2, -1)).transpose(0, 1) if both else field
    num_rows = len(field) // len(job.pieces)
    return field[piece.part * num_rows : (piece.part + 1) * num_rows]


def _companions(entry: PackedEntry, tensors: dict[str, torch.Tensor]) -> Fields:
    with naming(entry):
        return entry.format.companions(tensors)


def _column_order(reader: ShardReader, entry: PackedEntry) -> torch.Tensor:
    """In which order the columns of a matrix lie, [K]."""
    codes = max(entry.parts, key=lambda suffix: entry.parts[suffix].nbytes)
    return _companions(entry, read_packed(reader, entry, without=codes))["_order"].long()


def _place_order(
    order: torch.Tensor, fields: Fields, name: str, entry: PackedEntry, *, first: bool
) -> None:
    """Writes the order of columns; gate and up have one input, and the record one order of it.

    The second projection's has no field: its columns are met by the rows of the first.
    """
    field = fields.get(f"{name}_order")
    if field is None:
        return
    if first:
        field.copy_(order)
    elif not torch.equal(field, order):
        raise CheckpointError(
            f"`{entry.name}` in `{entry.file}` has its columns in another order than the gate "
            "beside it, which hotset does not support",
            hint="use a checkpoint without activation order (`desc_act` false)",
        )
