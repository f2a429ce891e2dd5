"""What of a file is in the page cache, and reads that go past it.

Knows one open file and memory to fill; nothing of tensors. To fill the page cache with what is read
once took 0.1 to 1.5 s/GB of a core where O_DIRECT takes 0.09, and pushes out what is needed longer.
O_DIRECT moves whole aligned blocks, so they are read beside their destination and copied.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import local

import numpy as np

from hotset.core.closing import Closing
from hotset.core.units import MIB

# Of one read: from here on longer ones were no faster (virtual disk).
_BLOCK_BYTES = 4 * MIB
# One page of so many is looked for in the page cache: to ask for each took a seventh of reading it.
_LOOKED_AT_BYTES = MIB
_LARGE_PAGE_BYTES = 2 * MIB
# What O_DIRECT aligns to: as large as blocks of disks are.
_ALIGN = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class DirectFile(Closing):
    """Reads of one file that leave the page cache alone; from several threads.

    Where the file system knows no O_DIRECT, all of the file counts as cached.

    Args:
        path: the file.
        descriptor: of the same file, opened to be read; it may be closed meanwhile.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._size = os.fstat(descriptor).st_size
        self._own = local()
        self._map: mmap.mmap | None = None
        self._descriptor: int | None = None
        try:
            # Never read, so that a file which shrinks cannot end in SIGBUS: it is only asked which
            # of its pages are there.
            self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except (OSError, ValueError) as error:
            if not _is_unsupported(error):
                raise

    def is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether a range is best read through the page cache: a page of each MiB is there.

        Of a file that is neither ours nor writable the system says that of every page.
        """
        if self._map is None or self._descriptor is None:
            return True
        end = min(offset + nbytes, self._size)
        pages = [*range(offset, end, _LOOKED_AT_BYTES), end - 1] if end > offset else []
        start = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        return all(_is_there(start + page // mmap.PAGESIZE * mmap.PAGESIZE) for page in pages)

    def read(self, offset: int, views: Sequence[memoryview]) -> int:
        """Fills views, one behind the other, with the bytes from `offset`.

        Returns:
            Bytes filled: fewer than asked for at the end of the file, or where the disk wants
            larger blocks than these.

        Raises:
            OSError: the file cannot be read.
        """
        assert self._descriptor is not None
        targets = deque(np.frombuffer(view, dtype=np.uint8) for view in views)
        end, place = offset + sum(map(len, views)), offset
        block = self._block()
        while place < end:
            first = place // _ALIGN * _ALIGN
            size = min(_BLOCK_BYTES, -(-(end - first) // _ALIGN) * _ALIGN)
            try:
                count = os.preadv(self._descriptor, [block[:size].data], first)
            except OSError as error:
                if not _is_unsupported(error):
                    raise
                break
            data = block[place - first : min(count, end - first)]
            if not len(data):
                break
            _fill(targets, data)
            place += len(data)
        return place - offset

    def close(self) -> None:
        """No read may be going on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._map is not None:
            self._map.close()
            self._map = None

    def _block(self) -> np.ndarray:
        """This thread's own, uint8 [_BLOCK_BYTES]."""
        if not hasattr(self._own, "block"):
            self._own.block = _large_pages(_BLOCK_BYTES)
        block: np.ndarray = self._own.block
        return block


def _large_pages(nbytes: int) -> np.ndarray:
    """New memory in pages that are as large as can be: a disk is asked for each stretch of physical
    memory apart, and in pages of 4 KiB a block has a thousand."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + _LARGE_PAGE_BYTES, flags=private)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -whole.ctypes.data % _LARGE_PAGE_BYTES
    return whole[start : start + nbytes]


def _is_there(address: int) -> bool:
    """Whether a mapped page is in memory, or nobody can tell."""
    page = ctypes.c_ubyte(1)
    _libc.mincore(address, 1, ctypes.addressof(page))
    return bool(page.value & 1)


def _fill(targets: deque[np.ndarray], data: np.ndarray) -> None:
    """Moves bytes to the first of what is to be filled, and takes off what is full."""
    while len(data):
        target = targets.popleft()
        count = min(len(target), len(data))
        np.copyto(target[:count], data[:count])
        if count < len(target):
            targets.appendleft(target[count:])
        data = data[count:]


def _is_unsupported(error: Exception) -> bool:
    """Whether a file system says that it does not map or read so. An empty file is not mapped."""
    known = (errno.EINVAL, errno.ENODEV, errno.EOPNOTSUPP)
    return not isinstance(error, OSError) or error.errno in known
