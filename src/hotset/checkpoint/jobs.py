"""What has to be done to fill all records: which bytes of which files go into which field.

Plans, moves nothing. Three kinds of jobs, see `loader`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from hotset.checkpoint.convert import stacks_rows
from hotset.checkpoint.index import TensorEntry
from hotset.checkpoint.mapping import ExpertPiece, KeyMap
from hotset.checkpoint.packed import PackedEntry
from hotset.checkpoint.record_formats import is_ordered, record_formats


class Kind(Enum):
    """How a job's bytes become a field's."""

    ROWS = "rows"  # the file's numbers, in whatever order
    CONVERT = "convert"  # the library's operations on one expert, dequantised before where needed
    PACK = "pack"  # codes and companions


@dataclass(frozen=True, slots=True)
class Source:
    """One expert's bytes of one checkpoint tensor; `shape` has no expert dimension."""

    entry: TensorEntry
    offset: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.entry.dtype)
        return dtype


@dataclass(frozen=True)
class Job:
    """Fills (rows of) one field of one record.

    Attributes:
        kind: see `Kind`.
        expert: whose record.
        pieces: one for `ROWS`, otherwise all of the expert's, in the order of their parts.
        rows: rows of the field that `ROWS` fills; all where it is `None`.
        row_order: the second projection whose columns say in which order the rows go, where they
            do not go as they are.
    """

    kind: Kind
    expert: int
    pieces: tuple[ExpertPiece, ...]
    rows: slice | None = None
    row_order: PackedEntry | None = None

    @property
    def piece(self) -> ExpertPiece:
        """Any of them: says which parameter, and how it is converted."""
        return self.pieces[0]

    @property
    def sources(self) -> tuple[Source, ...]:
        """All that is read for it, but for an order of rows."""
        return tuple(s for piece in self.pieces for s in sources_of(piece, self.expert))

    @property
    def place(self) -> tuple[Path, int]:
        """File and offset of the first numbers or codes."""
        piece = self.piece
        entry, codes = piece.entry, piece.entry
        if piece.expert is not None:
            return entry.file, entry.offset
        if isinstance(entry, PackedEntry):
            codes = max(entry.parts.values(), key=lambda part: part.nbytes)
        return entry.file, codes.offset + self.expert * (codes.nbytes // codes.shape[0])

    @property
    def nbytes(self) -> int:
        """Of its sources."""
        return sum(
            piece.entry.nbytes
            if piece.expert is not None
            else piece.entry.nbytes // piece.param.shape[0]
            for piece in self.pieces
        )

    @property
    def files(self) -> set[Path]:
        """Of its sources, and of an order of rows."""
        entries = [piece.entry for piece in self.pieces]
        if self.row_order is not None:
            entries.append(self.row_order)
        found: set[Path] = set()
        for entry in entries:
            if isinstance(entry, PackedEntry):
                found.update(part.file for part in entry.parts.values())
            else:
                found.add(entry.file)
        return found


def plan_jobs(key_map: KeyMap) -> list[Job]:
    """All jobs, ordered by the place of their first byte, so that disks are read forwards.

    Args:
        key_map: a checkpoint that `validate.check_complete` has passed.
    """
    formats = record_formats(key_map)
    orders = _row_orders(key_map, {name for name, f in formats.items() if not f.is_plain})
    pieces: dict[tuple[str, int | None], list[ExpertPiece]] = defaultdict(list)
    for piece in key_map.pieces:
        pieces[piece.param.full_name, piece.expert].append(piece)
    jobs: list[Job] = []
    for (name, _), parts in pieces.items():
        packed = name in formats and not formats[name].is_plain
        jobs += _jobs_of(parts, packed=packed, orders=orders)
    jobs.sort(key=lambda job: job.place)
    return jobs


def sources_of(piece: ExpertPiece, expert: int) -> list[Source]:
    """What is read of a piece for one expert."""
    entry = piece.entry
    entries = list(entry.parts.values()) if isinstance(entry, PackedEntry) else [entry]
    return [_source(each, None if piece.expert is not None else expert) for each in entries]


def _row_orders(key_map: KeyMap, packed: set[str]) -> dict[tuple[int, int], PackedEntry]:
    """Second projections whose column order permutes rows of the first, by layer and expert."""
    found = {}
    for piece in key_map.pieces:
        param = piece.param
        if param.field == "down" and param.full_name in packed and is_ordered(piece):
            assert isinstance(piece.entry, PackedEntry) and piece.expert is not None
            found[param.layer, piece.expert] = piece.entry
    return found


def _jobs_of(
    parts: list[ExpertPiece], *, packed: bool, orders: dict[tuple[int, int], PackedEntry]
) -> Iterator[Job]:
    """The jobs of one parameter and one expert, or of all experts when the tensor is fused."""
    parts = sorted(parts, key=lambda piece: piece.part)
    piece, pieces = parts[0], tuple(parts)
    experts = range(piece.param.shape[0]) if piece.expert is None else [piece.expert]
    has_codes = any(isinstance(part.entry, PackedEntry) for part in parts)
    for expert in experts:
        if packed:
            is_up = piece.param.field == "up"
            order = orders.get((piece.param.layer, expert)) if is_up else None
            yield Job(Kind.PACK, expert, pieces, row_order=order)
        elif has_codes:
            yield Job(Kind.CONVERT, expert, pieces)
        elif piece.converter is None:
            yield Job(Kind.ROWS, expert, pieces)
        elif _only_stacks(piece):
            yield from _stacked(pieces, expert)
        else:
            yield Job(Kind.CONVERT, expert, pieces)


def _stacked(pieces: tuple[ExpertPiece, ...], expert: int) -> Iterator[Job]:
    first = 0
    for piece in pieces:
        end = first + piece.entry.shape[0]
        yield Job(Kind.ROWS, expert, (piece,), rows=slice(first, end))
        first = end


def _only_stacks(piece: ExpertPiece) -> bool:
    """Whether an expert's tensors go below each other in the record as they are."""
    param, converter = piece.param, piece.converter
    assert converter is not None
    is_plain = not param.transposed and not param.interleaved
    return piece.expert is not None and is_plain and stacks_rows(converter)


def _source(entry: TensorEntry, expert: int | None) -> Source:
    if expert is None:
        return Source(entry, entry.offset, entry.shape)
    slice_bytes = entry.nbytes // entry.shape[0]
    return Source(entry, entry.offset + expert * slice_bytes, entry.shape[1:])
