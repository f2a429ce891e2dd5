"""Streams experts from the shards into their records, one piece at a time.

Knows where the bytes of an expert are and how a record wants them (gate rows, then up rows, each
[out, in]); knows nothing of where records live: `destination` hands out views. Host memory beyond
those views is one piece a thread (two where it is packed), or one expert's pieces where the library
must convert them.

Four routes, and a last step behind the first three where the record's fields are lossless:
    read        the file's rows are the record's rows: read straight into it
    rearrange   transposed, interleaved or of another dtype: read to scratch, one copy
    convert     the library's own operations, run on one expert; quantised pieces are dequantised
    pack        codes and companions of quantised weights, by `packing`
    lossless    rows of BF16 weights, read beside the record, by `lossless`
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event, Lock

import torch

from hotset.checkpoint.convert import convert_expert
from hotset.checkpoint.finite import is_finite, not_finite
from hotset.checkpoint.jobs import Job, Kind, Source, plan_jobs, sources_of
from hotset.checkpoint.lossless import pack_lossless
from hotset.checkpoint.mapping import ExpertPiece, KeyMap
from hotset.checkpoint.packed import PackedEntry, one_of_all, read_packed
from hotset.checkpoint.packing import pack
from hotset.checkpoint.params import as_in_module
from hotset.checkpoint.reader import ShardReader
from hotset.core.errors import CheckpointError

Fields = dict[str, torch.Tensor]
# (layer, expert) -> writable views of the record's fields by name. Called from several threads
# and several times for a record.
Destination = Callable[[int, int], Fields]
# (bytes done, bytes in total); called in the caller's thread, a few times a second.
Progress = Callable[[int, int], None]

_PROGRESS_SECONDS = 0.1
# What the fields of a quantised matrix are called beyond its own name (`core.geometry`).
_COMPANIONS = ("_scale", "_zero", "_global", "_order")


@dataclass(frozen=True)
class LoadReport:
    """What was loaded.

    Attributes:
        num_bytes: read from the files.
        num_records: experts filled.
        seconds: wall time.
    """

    num_bytes: int
    num_records: int
    seconds: float


def load_experts(
    key_map: KeyMap,
    *,
    destination: Destination,
    progress: Progress | None = None,
    num_threads: int | None = None,
    keep_file_cache: bool = False,
) -> LoadReport:
    """Fills the records of all experts, in the order in which their bytes lie in the files.

    When this returns or raises, `KeyboardInterrupt` included, no thread writes to a record any
    more and every file is closed.

    Args:
        key_map: a checkpoint that `validate.check_complete` has passed.
        destination: views of one record's fields, shaped as `ExpertSpec` says. Another float
            dtype than the file's is cast to, once. Must be thread-safe.
        progress: told how far it is.
        num_threads: readers, default `default_threads`. The result is the same.
        keep_file_cache: see `ShardReader`.

    Raises:
        CheckpointError: a file is unreadable or ends early, a tensor holds NaN or Inf, or a value
            does not fit the record's dtype; names tensor and file.
    """
    start = time.monotonic()
    jobs = plan_jobs(key_map)
    num_threads = num_threads or default_threads()
    with ShardReader(keep_file_cache=keep_file_cache) as reader:
        crew = _Crew(jobs, reader, destination)
        crew.run(num_threads, progress)
    records = {(job.piece.param.layer, job.expert) for job in jobs}
    return LoadReport(crew.total_bytes, len(records), time.monotonic() - start)


def default_threads() -> int:
    """Readers where nothing else is said: up to 4, by the cores there are."""
    return min(4, os.cpu_count() or 1)


class _Crew:
    """A few threads that work off one list of jobs in order, and stop together."""

    def __init__(self, jobs: list[Job], reader: ShardReader, destination: Destination) -> None:
        self.total_bytes = sum(job.nbytes for job in jobs)
        self._jobs = iter(enumerate(jobs))
        self._reader = reader
        self._destination = destination
        self._left = Counter(file for job in jobs for file in job.files)
        self._done_bytes = 0
        self._failures: dict[int, Exception] = {}
        self._stop = Event()
        self._lock = Lock()

    def run(self, num_threads: int, progress: Progress | None) -> None:
        """Works until all is done; raises what the first failing job in order raised."""
        with ThreadPoolExecutor(num_threads, thread_name_prefix="load-experts") as pool:
            try:
                workers = {pool.submit(self._work) for _ in range(num_threads)}
                while workers:
                    workers = wait(workers, timeout=_PROGRESS_SECONDS).not_done
                    if progress is not None:
                        progress(self._done_bytes, self.total_bytes)
            finally:
                # On Ctrl-C each thread finishes its piece; leaving the block waits for them.
                self._stop.set()
        if self._failures:
            raise self._failures[min(self._failures)]

    def _work(self) -> None:
        scratch = _Scratch()
        while not self._stop.is_set():
            with self._lock:
                number, job = next(self._jobs, (-1, None))
            if job is None:
                return
            try:
                self._do(job, scratch)
            except Exception as error:
                # Jobs are handed out in order, so of several failures the first in order is among
                # those recorded: the message does not depend on timing.
                self._failures[number] = error
                self._stop.set()
                raise
            self._finish(job)

    def _do(self, job: Job, scratch: _Scratch) -> None:
        param = job.piece.param
        fields = self._destination(param.layer, job.expert)
        if job.kind is Kind.PACK:
            self._pack(job, fields)
            return
        if f"{param.field}_exponent" in fields:
            self._pack_lossless(job, fields, scratch)
            return
        field = fields[param.field]
        self._fill(job, field if job.rows is None else field[job.rows], scratch)

    def _fill(self, job: Job, field: torch.Tensor, scratch: _Scratch) -> None:
        """Fills rows of a plain field."""
        rows = as_in_module(field, job.piece.param)
        if job.kind is Kind.CONVERT:
            self._convert(job, rows)
            return
        (source,) = job.sources
        if rows.is_contiguous() and rows.dtype == source.dtype and _in_host_memory(rows):
            self._read(source, rows)
            return
        read = scratch.take(source)
        self._read(source, read)
        _copy(read, rows, [source])

    def _read(self, source: Source, destination: torch.Tensor) -> None:
        if not self._reader.read_finite(source.entry.file, source.offset, destination):
            raise not_finite(source.entry)

    def _pack_lossless(self, job: Job, fields: Fields, scratch: _Scratch) -> None:
        """Fills rows of a lossless matrix: as plain ones beside the record first."""
        param = job.piece.param
        _, num_rows, columns = param.as_linear().shape
        rows = job.rows or slice(0, num_rows)
        weights = scratch.rows(rows.stop - rows.start, columns)
        self._fill(job, weights, scratch)
        weights = weights.to(fields[param.field].device)
        if not pack_lossless(weights, fields, param.field, first_row=rows.start):
            entry = job.sources[0].entry
            raise CheckpointError(
                f"tensor `{entry.name}` in `{entry.file}` does not fit the lossless format: the "
                f"weights of expert {job.expert} are of too many orders of magnitude side by side",
                hint="leave `--lossless` out",
            )

    def _pack(self, job: Job, fields: Fields) -> None:
        """Files are read into host memory: a record elsewhere gets its fields from there. Only
        those of this projection: another thread may be at the other one's."""
        name = job.piece.param.field
        own = {name + part for part in ("", *_COMPANIONS)} & fields.keys()
        away = [field for field in own if not _in_host_memory(fields[field])]
        here = {field: torch.empty_like(fields[field], device="cpu") for field in away}
        pack(self._reader, job, {**fields, **here})
        for field, value in here.items():
            fields[field].copy_(value)

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
            return one_of_all(entry, tensors)[None] if fused else entry.format.dequantise(tensors)
        (source,) = sources_of(piece, expert)
        read = torch.empty(source.shape, dtype=source.dtype)
        self._read(source, read)
        return read[None] if fused else read

    def _finish(self, job: Job) -> None:
        with self._lock:
            self._done_bytes += job.nbytes
            for file in job.files:
                self._left[file] -= 1
            used_up = [file for file in job.files if not self._left[file]]
        for file in used_up:
            self._reader.release(file)


class _Scratch:
    """One thread's buffers, for reading and for rows to pack; each grows to the largest piece."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._weights = torch.empty(0, dtype=torch.bfloat16)

    def take(self, source: Source) -> torch.Tensor:
        if len(self._bytes) < source.nbytes:
            self._bytes = torch.empty(source.nbytes, dtype=torch.uint8)
        return self._bytes[: source.nbytes].view(source.dtype).view(source.shape)

    def rows(self, num_rows: int, columns: int) -> torch.Tensor:
        size = num_rows * columns
        if len(self._weights) < size:
            self._weights = torch.empty(size, dtype=torch.bfloat16)
        return self._weights[:size].view(num_rows, columns)


def _in_host_memory(record: torch.Tensor) -> bool:
    """Whether files can be read into it."""
    return record.device.type == "cpu"


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
    destination.copy_(read.reshape(destination.shape))
