"""What fills records: for each job what is read to where, and what is done once it is there.

Knows how a record wants an expert's bytes (gate rows, then up rows, each [out, in]), not who reads
them when. Four routes, and a last step behind the first three where the record's fields are
lossless:
    read        the file's rows are the record's rows: read straight into it
    rearrange   transposed, interleaved or of another dtype: read beside the record, one copy
    convert     the library's own operations, run on one expert; quantised pieces are dequantised
    pack        codes and companions of quantised weights, by `packing`
    lossless    rows of BF16 weights, read beside the record, by `lossless`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hotset.checkpoint.convert import convert_expert
from hotset.checkpoint.finite import is_finite
from hotset.checkpoint.jobs import Job, Kind, Source, sources_of
from hotset.checkpoint.lossless import pack_lossless
from hotset.checkpoint.mapping import ExpertPiece
from hotset.checkpoint.packed import PackedEntry, dequantised, read_packed
from hotset.checkpoint.packing import Matrix, Packing
from hotset.checkpoint.params import as_in_module
from hotset.checkpoint.reader import Range, ShardReader, memory_of
from hotset.checkpoint.scratch import Scratch, copy_bits
from hotset.core.errors import CheckpointError

Fields = dict[str, torch.Tensor]
# (layer, expert) -> writable views of the record's fields by name. Called from several threads
# and several times for a record.
Destination = Callable[[int, int], Fields]

# What the fields of a quantised matrix are called beyond its own name (`core.formats`).
_COMPANIONS = ("_scale", "_zero", "_global", "_order")


class Filling:
    """Some jobs: `open` each, read `ranges`, then `finish`.

    Args:
        reader: of the files, for what is converted.
        packing: of quantised matrices.
        destination: of records.
        scratch: of this thread.

    Attributes:
        ranges: what is to be read.
    """

    def __init__(
        self, reader: ShardReader, packing: Packing, destination: Destination, scratch: Scratch
    ) -> None:
        self.ranges: list[Range] = []
        self._reader, self._packing = reader, packing
        self._destination, self._scratch = destination, scratch
        self._records: dict[tuple[int, int], Fields] = {}
        self._memories: dict[tuple[int, int], dict[str, memoryview]] = {}
        self._matrices: list[Matrix] = []
        self._last: list[Callable[[], None]] = []

    def open(self, job: Job) -> None:
        """Asks for what a job needs.

        Raises:
            CheckpointError: the order of rows, where columns have one, cannot be read.
        """
        param = job.piece.param
        fields = self._record(param.layer, job.expert)
        if job.kind is Kind.PACK:
            self._pack(job, fields)
        elif f"{param.field}_exponent" in fields:
            self._pack_lossless(job, fields)
        else:
            field = fields[param.field]
            self._fill(job, field if job.rows is None else field[job.rows])

    def finish(self) -> None:
        """Checks and puts in place what was read.

        Raises:
            CheckpointError: values that are no weights', or that the record cannot hold; and of
                what is converted all that reading raises.
        """
        self._packing.finish(self._matrices)
        for step in self._last:
            step()

    def _record(self, layer: int, expert: int) -> Fields:
        found = self._records.get((layer, expert))
        if found is None:
            found = self._records[layer, expert] = self._destination(layer, expert)
        return found

    def _memory(self, job: Job, fields: Fields) -> dict[str, memoryview]:
        """Of fields in host memory."""
        key = job.piece.param.layer, job.expert
        found = self._memories.get(key)
        if found is None:
            found = self._memories[key] = {
                name: memory_of(field)
                for name, field in fields.items()
                if _in_host_memory(field) and field.is_contiguous()
            }
        return found

    def _fill(self, job: Job, field: torch.Tensor) -> None:
        """Fills rows of a plain field."""
        rows = as_in_module(field, job.piece.param)
        if job.kind is Kind.CONVERT:
            self._last.append(partial(self._convert, job, rows))
            return
        (source,) = job.sources
        if rows.is_contiguous() and rows.dtype == source.dtype and _in_host_memory(rows):
            self._ask(source, rows)
            return
        read = self._scratch.take(source.shape, source.dtype)
        self._ask(source, read)
        self._last.append(partial(_copy, read, rows, [source]))

    def _ask(self, source: Source, tensor: torch.Tensor) -> None:
        memory, entry = memory_of(tensor), source.entry
        self.ranges.append(Range(entry.file, source.offset, memory, entry, source.dtype))

    def _pack(self, job: Job, fields: Fields) -> None:
        """Files are read into host memory: a record elsewhere gets its fields from there. Only
        those of this projection: another thread may be at the other one's."""
        memory = self._memory(job, fields)
        if len(memory) < len(fields):
            fields, memory = self._beside(job.piece.param.field, fields, memory)
        matrices, ranges = self._packing.open(job, fields, memory, self._scratch)
        self._matrices += matrices
        self.ranges += ranges

    def _beside(
        self, name: str, fields: Fields, memory: dict[str, memoryview]
    ) -> tuple[Fields, dict[str, memoryview]]:
        """The same with fields of one projection beside the record, copied there at the end."""
        own = {name + part for part in ("", *_COMPANIONS)} & fields.keys() - memory.keys()
        here = {
            field: self._scratch.take(tuple(fields[field].shape), fields[field].dtype)
            for field in own
        }
        self._last += [partial(copy_bits, value, fields[field]) for field, value in here.items()]
        read = {field: memory_of(value) for field, value in here.items()}
        return {**fields, **here}, {**memory, **read}

    def _pack_lossless(self, job: Job, fields: Fields) -> None:
        """Fills rows of a lossless matrix: as plain ones beside the record first."""
        _, num_rows, columns = job.piece.param.as_linear().shape
        rows = job.rows or slice(0, num_rows)
        shape = (rows.stop - rows.start, columns)
        weights = self._scratch.take(shape, torch.bfloat16)
        self._fill(job, weights)
        self._last.append(partial(_to_lossless, job, weights, fields, first_row=rows.start))

    def _convert(self, job: Job, destination: torch.Tensor) -> None:
        converter = job.piece.converter
        pieces = {piece.part: self._one_expert(piece, job.expert) for piece in job.pieces}
        if converter is None:
            made = pieces[0]
        else:
            patterns = converter.source_patterns
            sources = {patterns[part]: tensor for part, tensor in pieces.items()}
            made = convert_expert(converter, sources, job.piece.param)
        _copy(made, destination, job.sources)

    def _one_expert(self, piece: ExpertPiece, expert: int) -> torch.Tensor:
        """A piece as the library sees it; of a tensor fused over experts a slice of one."""
        entry, fused = piece.entry, piece.expert is None
        if isinstance(entry, PackedEntry):
            tensors = read_packed(self._reader, entry, expert=expert if fused else None)
            matrix = dequantised(entry, tensors)
            return matrix[None] if fused else matrix
        (source,) = sources_of(piece, expert)
        read = torch.empty(source.shape, dtype=source.dtype)
        self._reader.read_checked(entry, source.offset, read)
        return read[None] if fused else read


def _to_lossless(job: Job, weights: torch.Tensor, fields: Fields, *, first_row: int) -> None:
    name = job.piece.param.field
    weights = weights.to(fields[name].device)
    if not pack_lossless(weights, fields, name, first_row=first_row):
        entry = job.sources[0].entry
        raise CheckpointError(
            f"tensor `{entry.name}` in `{entry.file}` does not fit the lossless format: the "
            f"weights of expert {job.expert} are of too many orders of magnitude side by side",
            hint="leave `--lossless` out",
        )


def _copy(read: torch.Tensor, destination: torch.Tensor, sources: Iterable[Source]) -> None:
    """Rearranges and casts; finite values that the record's dtype cannot hold are an error."""
    if read.dtype != destination.dtype:
        read = read.to(destination.dtype)
        if not is_finite(read):
            entry = next(iter(sources)).entry
            raise CheckpointError(
                f"tensor `{entry.name}` in `{entry.file}` has values that "
                f"{str(destination.dtype).removeprefix('torch.')} cannot hold",
                hint=f"use `--dtype {entry.dtype}`",
            )
    copy_bits(read.reshape(destination.shape), destination)


def _in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether files can be read into it."""
    return tensor.device.type == "cpu"
