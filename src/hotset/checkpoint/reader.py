"""Bytes of shards, read straight into memory that someone else owns.

Knows files and byte ranges; knows nothing of tensors' meanings.

Why `pread` and not a memory map: a read goes into its final place without a page fault or an
intermediate copy, and a file that shrinks or a disk that fails is an error with a name, where a
map kills the process with SIGBUS.
"""

from __future__ import annotations

import ctypes
import os
from itertools import groupby
from pathlib import Path
from threading import Lock

import torch

from hotset.checkpoint.finite import is_finite
from hotset.core.closing import Closing
from hotset.core.errors import CheckpointError
from hotset.core.units import MIB

# Bytes that are looked at right behind being read, while they are in a core's own cache. Read and
# checked in one go, BF16 took 0.16 s/GB of one core, in such steps 0.13; reading alone 0.09.
_CHECKED_BYTES = MIB

# (file, offset, what its bytes fill)
Range = tuple[Path, int, torch.Tensor]


class ShardReader(Closing):
    """Open files of a checkpoint. Thread-safe; a context manager that closes all of them.

    Args:
        keep_file_cache: leave what was read in the page cache, for a faster next start. Without
            it a shard's pages are given back as soon as it is used up: otherwise the file cache,
            which grows to the size of the checkpoint, competes with the arena that the same bytes
            were just copied to (and counts against a container's memory limit).
    """

    def __init__(self, *, keep_file_cache: bool = False) -> None:
        self._keep_file_cache = keep_file_cache
        self._descriptors: dict[Path, int] = {}
        self._closed = False
        self._lock = Lock()

    def read_into(self, file: Path, offset: int, *destinations: torch.Tensor) -> None:
        """Fills contiguous CPU tensors, one behind the other, with the file's bytes from `offset`.

        Raises:
            CheckpointError: the file cannot be read, or ends early.
        """
        views = [_bytes_of(each) for each in destinations if each.numel()]
        total, done = sum(map(len, views)), 0
        try:
            descriptor = self._open(file)
            # One call moves at most 2 GiB.
            while views:
                count = os.preadv(descriptor, views, offset + done)
                if count == 0:
                    break
                done += count
                views = _rest(views, count)
        except OSError as error:
            raise CheckpointError(
                f"cannot read `{file}`: {error.strerror}",
                hint="check the file's permissions and the disk",
            ) from error
        if done < total:
            raise CheckpointError(
                f"`{file}` ends early: expected {total} bytes from byte {offset} on, got {done}",
                hint="was the file replaced while it was read? download or copy it again",
            )

    def read_all(self, ranges: list[Range]) -> None:
        """Fills several tensors, forwards through each file; neighbours in one call.

        Raises:
            CheckpointError: as `read_into`.
        """
        ordered = sorted(ranges, key=lambda one: one[:2])
        starts: list[tuple[Path, int]] = []
        end: tuple[Path, int] | None = None
        for file, offset, tensor in ordered:
            starts.append(starts[-1] if (file, offset) == end else (file, offset))
            end = (file, offset + tensor.nbytes)
        runs = zip(starts, ordered, strict=True)
        for (file, offset), run in groupby(runs, key=lambda pair: pair[0]):
            self.read_into(file, offset, *(tensor for _, (_, _, tensor) in run))

    def read_finite(self, file: Path, offset: int, destination: torch.Tensor) -> bool:
        """As `read_into`; whether no element is NaN or Inf. What lies behind one may be unread.

        Raises:
            CheckpointError: as `read_into`.
        """
        flat = destination.detach().reshape(-1)
        for part in flat.split(_CHECKED_BYTES // flat.itemsize):
            self.read_into(file, offset, part)
            if not is_finite(part):
                return False
            offset += part.nbytes
        return True

    def release(self, file: Path) -> None:
        """Closes a file that is used up and gives its page cache back."""
        with self._lock:
            descriptor = self._descriptors.pop(file, None)
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


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's memory, good while the tensor is; by its address, as views of it take longer than
    reading small pieces does."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left to fill once the first `count` bytes are."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []
