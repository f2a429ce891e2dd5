"""Packs one expert's quantised matrix into its record: codes, scales, zero points.

Codes and scales that the file has as the record wants them are read straight into it, neighbours
in one call; all else is read beside it and rearranged. What the rearrangement is belongs to the
format; where rows go is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hotset.checkpoint.jobs import Job
from hotset.checkpoint.mapping import ExpertPiece
from hotset.checkpoint.packed import PackedEntry, check_values, ranges_of, read_packed
from hotset.checkpoint.reader import Range, ShardReader
from hotset.core.errors import CheckpointError

Fields = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Piece:
    """One quantised matrix on its way into a record.

    Attributes:
        piece, entry: what it is.
        tensors: its tensors by suffix; those of `in_place` are parts of the record.
        in_place: suffixes of what needs no rearranging.
    """

    piece: ExpertPiece
    entry: PackedEntry
    tensors: Fields
    in_place: frozenset[str]


def pack(reader: ShardReader, job: Job, fields: Fields) -> None:
    """Fills a record's fields of one projection.

    Args:
        reader: of the files.
        job: of kind `PACK`.
        fields: writable views of the record's fields.

    Raises:
        CheckpointError: unreadable, or values that are no weights'; names tensor and file.
    """
    row_order = None if job.row_order is None else _column_order(reader, job.row_order)
    is_moved = row_order is not None
    opened = [_open(piece, job, fields, is_moved=is_moved) for piece in job.pieces]
    ranges: list[Range] = []
    for one in opened:
        expert = None if one.piece.expert is not None else job.expert
        ranges += ranges_of(one.entry, one.tensors, expert=expert)
    reader.read_all(ranges)
    for one in opened:
        check_values(one.entry, one.tensors)
        _rearrange(one, job, fields, row_order)


def _open(piece: ExpertPiece, job: Job, fields: Fields, *, is_moved: bool) -> _Piece:
    """Where a matrix is read to: into the record where its rows are the record's, else beside."""
    entry, name = piece.entry, job.piece.param.field
    assert isinstance(entry, PackedEntry)
    tensors, in_place = {}, set()
    for suffix, part in entry.parts.items():
        dtype: torch.dtype = getattr(torch, part.dtype)
        shape = part.shape if piece.expert is not None else part.shape[1:]
        ending = None if is_moved else entry.format.as_stored.get(suffix)
        if ending is not None:
            field = half(fields[name + ending], job, piece)
            if field.is_contiguous():
                field = field if field.dtype == dtype else field.view(dtype)
                tensors[suffix] = field if field.shape == shape else field.view(shape)
                in_place.add(suffix)
                continue
        tensors[suffix] = torch.empty(shape, dtype=dtype)
    return _Piece(piece, entry, tensors, frozenset(in_place))


def _rearrange(one: _Piece, job: Job, fields: Fields, row_order: torch.Tensor | None) -> None:
    """Copies to the record what was read beside it."""
    name, format_ = job.piece.param.field, one.entry.format
    done = {format_.as_stored[suffix] for suffix in one.in_place}
    made = _companions(one.entry, one.tensors)
    if "" not in done:
        made[""] = format_.codes(one.tensors)
    order = made.pop("_order", None)
    if order is not None:
        _place_order(order, fields, name, one.entry, first=one.piece is job.piece)
    for ending in made.keys() - done:
        rows = made[ending] if row_order is None else made[ending][row_order]
        target = half(fields[name + ending], job, one.piece)
        target.copy_(rows.reshape(target.shape))


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
