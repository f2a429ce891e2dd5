"""Bytes of shards, read straight into memory that someone else owns.

Knows files, byte ranges and which of them are numbers; nothing of what tensors mean. What is in the
page cache is read through it, the rest past it (`direct`).

Why `pread` and not a memory map: a read goes into its final place without a page fault or an
intermediate copy, and a file that shrinks or a disk that fails is an error with a name, where a
map kills the process with SIGBUS.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch

from hotset.checkpoint.direct import DirectFile
from hotset.checkpoint.files import readable
from hotset.checkpoint.finite import is_finite_memory, not_finite
from hotset.checkpoint.index import TensorEntry
from hotset.core.closing import Closing
from hotset.core.errors import CheckpointError
from hotset.core.units import MIB

# Bytes of one read through the page cache, where they are numbers: those are looked at right
# behind it, while a cache of the CPU holds them. In steps of 512 KiB, 1, 2, 4 and 16 MiB BF16 was
# loaded at 0.55, 0.65, 0.60, 0.69 and 0.59 of plain reads (two threads): in short ones a thread
# often waits for Python's lock. All else is read at once for the same reason.
_CHECKED_BYTES = 4 * MIB
# Pieces of one read: less than the system takes (1,024).
_MOST_PIECES = 512


class Range(NamedTuple):
    """Bytes of a file, and where they go.

    Attributes:
        file, offset: where they are.
        memory: contiguous bytes that they fill.
        entry: the tensor that they belong to.
        numbers: dtype of what must not be NaN or Inf; `None` for what is not looked at.
    """

    file: Path
    offset: int
    memory: memoryview
    entry: TensorEntry
    numbers: torch.dtype | None = None


class ShardReader(Closing):
    """Open files of a checkpoint. Thread-safe; a context manager that closes all of them.

    Args:
        keep_file_cache: leave what was read in the page cache, for a faster next start. Without
            it what is not there is read past it, and a shard's pages are given back as soon as it
            is used up: otherwise the file cache, which grows to the size of the checkpoint,
            competes with the arena that the same bytes were just copied to (and counts against a
            container's memory limit).
    """

    def __init__(self, *, keep_file_cache: bool = False) -> None:
        self._keep_file_cache = keep_file_cache
        self._descriptors: dict[Path, int] = {}
        self._direct: dict[Path, DirectFile] = {}
        self._closed = False
        self._lock = Lock()

    def read_into(self, file: Path, offset: int, *destinations: torch.Tensor) -> None:
        """Fills contiguous CPU tensors, one behind the other, with the file's bytes from `offset`,
        through the page cache.

        Raises:
            CheckpointError: the file cannot be read, or ends early.
        """
        views = [memory_of(each) for each in destinations if each.numel()]
        self._fill(file, offset, views)

    def read_checked(self, entry: TensorEntry, offset: int, destination: torch.Tensor) -> None:
        """As `read_into`, of (a part of) a tensor of numbers.

        Raises:
            CheckpointError: as `read_into`; or an element is NaN or Inf.
        """
        if destination.numel():
            memory = memory_of(destination)
            self._through_cache([Range(entry.file, offset, memory, entry, destination.dtype)])

    def read_all(self, ranges: Iterable[Range]) -> None:
        """Fills several ranges, forwards through each file; neighbours in one call.

        Raises:
            CheckpointError: as `read_checked`.
        """
        for run in _runs(sorted(ranges, key=lambda one: one[:2])):
            file, offset = run[0].file, run[0].offset
            nbytes = sum(len(one.memory) for one in run)
            direct = None if self._keep_file_cache else self._past(file)
            if direct is None or direct.is_cached(offset, nbytes):
                self._through_cache(run)
            else:
                self._past_cache(direct, run)

    def _through_cache(self, run: Sequence[Range]) -> None:
        """Neighbours, in steps."""
        step: list[Range] = []
        num_checked = 0
        for one in run:
            for part in _steps(one):
                step.append(part)
                num_checked += 0 if part.numbers is None else len(part.memory)
                if num_checked >= _CHECKED_BYTES or len(step) == _MOST_PIECES:
                    self._step(step)
                    step, num_checked = [], 0
        if step:
            self._step(step)

    def _step(self, parts: Sequence[Range]) -> None:
        self._fill(parts[0].file, parts[0].offset, [part.memory for part in parts])
        _require_finite(parts)

    def _past_cache(self, direct: DirectFile, run: Sequence[Range]) -> None:
        """Neighbours, by way of blocks beside them."""
        file, offset = run[0].file, run[0].offset
        views = [one.memory for one in run]
        with readable(file):
            done = direct.read(offset, views)
        # What is left says why, or is read all the same.
        self._fill(file, offset, views, done=done)
        _require_finite(run)

    def _fill(self, file: Path, offset: int, views: Sequence[memoryview], *, done: int = 0) -> None:
        """Fills views from `offset` on, of which so many bytes are there already."""
        total, rest = sum(map(len, views)), _rest(views, done)
        with readable(file):
            descriptor = self._open(file)
            # One call moves at most 2 GiB.
            while rest:
                count = os.preadv(descriptor, rest, offset + done)
                if count == 0:
                    break
                done += count
                rest = _rest(rest, count)
        if done < total:
            raise _ends_early(file, offset, views, done)

    def release(self, file: Path) -> None:
        """Closes a file that is used up and gives its page cache back."""
        with self._lock:
            descriptor = self._descriptors.pop(file, None)
            direct = self._direct.pop(file, None)
        if direct is not None:
            direct.close()
        if descriptor is None:
            return
        if not self._keep_file_cache:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    def close(self) -> None:
        """Releases all files. A read that comes later, from a thread left behind, fails."""
        self._closed = True
        for file in tuple(self._descriptors):
            self.release(file)

    def _open(self, file: Path) -> int:
        with self._lock:
            if self._closed:
                raise ValueError("read from a closed ShardReader")
            if file not in self._descriptors:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                # Several threads read one file forwards, which to the system looks like no order:
                # told, it read a cold one at 1.1 GB/s instead of 0.3 (two threads, virtual disk).
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                self._descriptors[file] = descriptor
            return self._descriptors[file]

    def _past(self, file: Path) -> DirectFile:
        with readable(file):
            descriptor = self._open(file)
            with self._lock:
                if file not in self._direct:
                    self._direct[file] = DirectFile(file, descriptor)
                return self._direct[file]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor that is not empty, good while the tensor is; by its address, as views
    of it take longer than reading small pieces does."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _runs(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """Neighbours together; empty ranges left out."""
    run: list[Range] = []
    end: tuple[Path, int] | None = None
    for one in ranges:
        if not len(one.memory):
            continue
        if run and (one.file, one.offset) != end:
            yield run
            run = []
        run.append(one)
        end = (one.file, one.offset + len(one.memory))
    if run:
        yield run


def _steps(one: Range) -> Iterable[Range]:
    """Numbers in parts that a core's cache holds, all else whole."""
    if one.numbers is None or len(one.memory) <= _CHECKED_BYTES:
        return (one,)
    starts = range(0, len(one.memory), _CHECKED_BYTES)
    return [
        one._replace(offset=one.offset + start, memory=one.memory[start : start + _CHECKED_BYTES])
        for start in starts
    ]


def _require_finite(parts: Iterable[Range]) -> None:
    for part in parts:
        if part.numbers is not None and not is_finite_memory(part.memory, part.numbers):
            raise not_finite(part.entry)


def _ends_early(file: Path, offset: int, views: Sequence[memoryview], done: int) -> CheckpointError:
    """Of the first view that was not filled."""
    for view in views:
        if done < len(view):
            break
        offset, done = offset + len(view), done - len(view)
    return CheckpointError(
        f"`{file}` ends early: expected {len(view)} bytes from byte {offset} on, got {done}",
        hint="was the file replaced while it was read? download or copy it again",
    )


def _rest(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left to fill once the first `count` bytes are."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]] if count else list(views[index:])
        count -= len(view)
    return []
