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

from hotset.checkpoint.jobs import Job
from hotset.checkpoint.mapping import ExpertPiece
from hotset.checkpoint.packed import PackedEntry, check_scales, ranges_of, read_packed
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
        expected: bytes that it must have, where it says nothing but a shape.
    """

    ending: str | None
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    expected: bytes | None = None


class _Alike:
    """What all matrices of one kind have in common: the same half of the same field, in files of
    the same format and dtypes.

    Attributes:
        places: by suffix.
        is_done: reading fills all of the record's fields: nothing is to be rearranged.
    """

    def __init__(self, job: Job, piece: ExpertPiece, fields: Fields, *, is_moved: bool) -> None:
        entry = _packed(piece)
        self._parts, self._format = list(entry.parts.values()), entry.format
        self._is_moved = is_moved
        self.places = {
            suffix: _place(job, piece, fields, suffix, is_moved=is_moved) for suffix in entry.parts
        }
        self.is_done = all(
            place.ending is not None or place.expected is not None for place in self.places.values()
        )

    def has(self, entry: PackedEntry, *, is_moved: bool) -> bool:
        """Whether a matrix of the same half and field is one of these."""
        return (
            entry.format == self._format
            and is_moved == self._is_moved
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
    memories: dict[str, memoryview]
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
        matrices, ranges = [], []
        for piece in job.pieces:
            alike = self._alike_of(job, piece, fields, is_moved=order is not None)
            memories = {
                suffix: scratch.memory(place.nbytes)
                if place.ending is None
                else field_memory[name + place.ending][place.start : place.start + place.nbytes]
                for suffix, place in alike.places.items()
            }
            matrices.append(Matrix(job, piece, fields, alike, memories, order))
            expert = None if piece.expert is not None else job.expert
            ranges += ranges_of(_packed(piece), memories, expert=expert)
        return matrices, ranges

    @staticmethod
    def finish(matrices: Iterable[Matrix]) -> None:
        """Checks what was read, and rearranges what is not in its place yet.

        Raises:
            CheckpointError: values that are no weights'; names tensor and file.
        """
        groups: dict[int, list[Matrix]] = defaultdict(list)
        for one in matrices:
            groups[id(one.alike)].append(one)
        for group in groups.values():
            check_scales([(one.entry, one.memories) for one in group])
            for one in group:
                if not one.alike.is_done or _says_otherwise(one):
                    _rearrange(one)

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
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    ending = None if is_moved else format_.as_stored.get(suffix)
    if ending is not None:
        field = fields[job.piece.param.field + ending]
        rows = half(field, job, piece)
        if rows.is_contiguous() and rows.nbytes == nbytes:
            return _Place(ending, rows.data_ptr() - field.data_ptr(), nbytes, dtype, shape)
    expected = None
    if suffix == format_.says_shape:
        expected = torch.tensor(format_.shape, dtype=dtype).numpy().tobytes()
    return _Place(None, 0, nbytes, dtype, shape, expected)


def _says_otherwise(one: Matrix) -> bool:
    """Whether a tensor that says a shape says another one."""
    return any(
        place.expected is not None and one.memories[suffix] != place.expected
        for suffix, place in one.alike.places.items()
    )


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
    try:
        return entry.format.companions(tensors)
    except CheckpointError as error:
        # A format sees values, not where they are from.
        raise CheckpointError(
            f"`{entry.name}` in `{entry.file}`: {error.message}", hint=error.hint
        ) from error


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
