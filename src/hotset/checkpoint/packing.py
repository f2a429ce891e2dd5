"""Packs one expert's quantised matrix into its record: codes, scales, zero points.

Codes that the file has as the record wants them are read straight into it; all else is read beside
it and rearranged. What the rearrangement is belongs to the format; where rows go is decided here.
"""

from __future__ import annotations

import torch

from hotset.checkpoint.finite import is_finite
from hotset.checkpoint.jobs import Job
from hotset.checkpoint.mapping import ExpertPiece
from hotset.checkpoint.packed import PackedEntry, damaged, read_packed
from hotset.checkpoint.reader import ShardReader
from hotset.core.errors import CheckpointError

Fields = dict[str, torch.Tensor]


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
    name = job.piece.param.field
    for piece in job.pieces:
        entry = piece.entry
        assert isinstance(entry, PackedEntry)
        expert = None if piece.expert is not None else job.expert
        codes = half(fields[name], job, piece)
        straight = entry.format.stored if codes.is_contiguous() and row_order is None else None
        if straight is not None:
            _read_codes(reader, entry, straight, expert, codes)
        tensors = read_packed(reader, entry, expert=expert, without=straight)
        made = _companions(entry, tensors)
        if straight is None:
            made[""] = entry.format.codes(tensors)
        order = made.pop("_order", None)
        if order is not None:
            _place_order(order, fields, name, entry, first=piece is job.piece)
        for ending, value in made.items():
            rows = value if row_order is None else value[row_order]
            target = half(fields[name + ending], job, piece)
            target.copy_(rows.reshape(target.shape))


def half(field: torch.Tensor, job: Job, piece: ExpertPiece) -> torch.Tensor:
    """Where the rows of a piece go: a part of the field's rows, or all, seen in the piece's order.

    Of an interleaved tensor of all experts [2I, ...] the field is seen as [I, 2, ...].
    """
    if piece.expert is None:
        both = piece.param.interleaved
        return field.unflatten(0, (2, -1)).transpose(0, 1) if both else field
    parts: torch.Tensor = field.unflatten(0, (len(job.pieces), -1))
    return parts[piece.part]


def _read_codes(
    reader: ShardReader, entry: PackedEntry, suffix: str, expert: int | None, codes: torch.Tensor
) -> None:
    part = entry.parts[suffix]
    offset = part.offset + (0 if expert is None else expert * (part.nbytes // part.shape[0]))
    reader.read_into(part.file, offset, codes)
    if not is_finite(codes.view(getattr(torch, part.dtype))):
        raise damaged(part)


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
