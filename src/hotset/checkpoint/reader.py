"""Bytes of shards, read straight into memory that someone else owns.

Knows files and byte ranges; knows nothing of tensors' meanings.

Why `pread` and not a memory map: a read goes into its final place without a page fault or an
intermediate copy, and a file that shrinks or a disk that fails is an error with a name, where a
map kills the process with SIGBUS.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock

import torch

from hotset.core.closing import Closing
from hotset.core.errors import CheckpointError


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

    def read_into(self, file: Path, offset: int, destination: torch.Tensor) -> None:
        """Fills a contiguous CPU tensor with the file's bytes from `offset` on.

        Raises:
            CheckpointError: the file cannot be read, or ends early.
        """
        assert destination.is_contiguous() and destination.device.type == "cpu"
        if not destination.numel():
            return
        view = memoryview(destination.detach().reshape(-1).view(torch.uint8).numpy().data)
        done = 0
        try:
            descriptor = self._open(file)
            # One call moves at most 2 GiB.
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise CheckpointError(
                f"cannot read `{file}`: {error.strerror}",
                hint="check the file's permissions and the disk",
            ) from error
        if done < len(view):
            raise CheckpointError(
                f"`{file}` ends early: expected {len(view)} bytes from byte {offset} on, "
                f"got {done}",
                hint="was the file replaced while it was read? download or copy it again",
            )

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
                self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[file]
