"""Streams experts from the shards into their records, some MiB at a time.

Deals out jobs to threads and counts what is done; what becomes of one is in `filling`. Knows
nothing of where records live: `destination` hands out views. Host memory beyond those views is some
MiB a thread for what cannot be read in place, and a block for what is read past the page cache.

Threads share Python's lock, which reading and checking give up. So a thread takes neighbouring jobs
of `_BATCH_BYTES` together: what Python does for one of them is little, and the reads are long.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from threading import Event, Lock

from hotset.checkpoint.filling import Destination, Filling
from hotset.checkpoint.jobs import Job, plan_jobs
from hotset.checkpoint.mapping import KeyMap
from hotset.checkpoint.packing import Packing
from hotset.checkpoint.reader import ShardReader
from hotset.checkpoint.scratch import Scratch
from hotset.core.units import MIB

# (bytes done, bytes in total); called in the caller's thread, a few times a second.
Progress = Callable[[int, int], None]

_PROGRESS_SECONDS = 0.1
# Of the jobs that a thread takes at a time, at most; all threads together a part of what is loaded,
# as what they read beside the records is of that size, and none should be left with the end of it.
_BATCH_BYTES = 32 * MIB
_BATCHES_PART = 8


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
    """Readers where nothing else is said: up to 4, on few cores twice as many as there are, as some
    wait for the disk while others work."""
    return min(4, 2 * (os.cpu_count() or 1))


class _Crew:
    """A few threads that work off one list of jobs in order, and stop together."""

    def __init__(self, jobs: list[Job], reader: ShardReader, destination: Destination) -> None:
        self._sizes = [job.nbytes for job in jobs]
        self.total_bytes = sum(self._sizes)
        self._jobs, self._next = jobs, 0
        self._batch_bytes = _BATCH_BYTES
        self._reader = reader
        self._destination = destination
        self._packing = Packing(reader)
        self._files = [job.files for job in jobs]
        self._left = Counter(chain.from_iterable(self._files))
        self._done_bytes = 0
        self._failures: dict[int, Exception] = {}
        self._stop = Event()
        self._lock = Lock()

    def run(self, num_threads: int, progress: Progress | None) -> None:
        """Works until all is done; raises what the first failing batch in order raised."""
        self._batch_bytes = min(_BATCH_BYTES, self.total_bytes // (_BATCHES_PART * num_threads))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="load-experts") as pool:
            try:
                workers = {pool.submit(self._work) for _ in range(num_threads)}
                while workers:
                    workers = wait(workers, timeout=_PROGRESS_SECONDS).not_done
                    if progress is not None:
                        progress(self._done_bytes, self.total_bytes)
            finally:
                # On Ctrl-C each thread finishes what it reads; leaving the block waits for them.
                self._stop.set()
        if self._failures:
            raise self._failures[min(self._failures)]

    def _work(self) -> None:
        scratch = Scratch()
        while not self._stop.is_set():
            first, end = self._take()
            if first == end:
                return
            try:
                self._do(self._jobs[first:end], scratch)
            except Exception as error:
                # Jobs are handed out in order, so of several failures the first in order is among
                # those recorded: the message does not depend on timing.
                self._failures[first] = error
                self._stop.set()
                raise
            self._finish(first, end)

    def _take(self) -> tuple[int, int]:
        """The next jobs, as a range of their numbers; empty when there are none."""
        with self._lock:
            first = end = self._next
            nbytes = 0
            while end < len(self._jobs) and (end == first or nbytes < self._batch_bytes):
                nbytes += self._sizes[end]
                end += 1
            self._next = end
        return first, end

    def _do(self, jobs: list[Job], scratch: Scratch) -> None:
        scratch.reset()
        filling = Filling(self._reader, self._packing, self._destination, scratch)
        # Also once another thread has failed: an earlier batch may have the first fault.
        for job in jobs:
            filling.open(job)
        self._reader.read_all(filling.ranges)
        filling.finish()

    def _finish(self, first: int, end: int) -> None:
        done = Counter(chain.from_iterable(self._files[first:end]))
        with self._lock:
            self._done_bytes += sum(self._sizes[first:end])
            self._left -= done  # what is used up is gone
            used_up = done.keys() - self._left.keys()
        for file in used_up:
            self._reader.release(file)
