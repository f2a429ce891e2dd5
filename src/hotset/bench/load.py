"""`bench load`: a checkpoint into the arena, against reading the same files plainly.

Plainly is into the same memory, by as many threads, in long reads that look at nothing: with
O_DIRECT where the page cache was emptied before, through it where it holds all. Also the memory
that loading takes beside the arena.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from hotset.bench.rows import Row, Spread
from hotset.checkpoint.loader import load_experts
from hotset.core.errors import ConfigError
from hotset.core.slot_pools import SlotPools
from hotset.core.units import MIB
from hotset.experts.store import ExpertStore
from hotset.models.describe import read_keys
from hotset.models.geometry import build_meta, read_config
from hotset.models.quantised import geometry_of

_READ_BYTES = 4 * MIB
_SAMPLE_SECONDS = 0.002


@dataclass(frozen=True)
class _Files:
    """Shards, read plainly or put out of the page cache."""

    paths: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def evict(self) -> None:
        """Puts them out of the page cache; what is not on the disk yet cannot leave it."""
        for path in self.paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def read(self, memory: memoryview, *, num_threads: int, direct: bool) -> float:
        """Seconds of reading all of them, over and over into the same memory."""
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        descriptors = [os.open(path, flags) for path in self.paths]
        size = min(_READ_BYTES, len(memory) // 2 // mmap.PAGESIZE * mmap.PAGESIZE)
        places = [
            (descriptor, offset)
            for path, descriptor in zip(self.paths, descriptors, strict=True)
            for offset in range(0, path.stat().st_size, size)
        ]

        def read(index: int) -> int:
            descriptor, offset = places[index]
            start = index * size % (len(memory) - size)
            return os.preadv(descriptor, [memory[start : start + size]], offset)

        try:
            with ThreadPoolExecutor(num_threads) as pool:
                begun = time.perf_counter()
                num_read = sum(pool.map(read, range(len(places))))
                seconds = time.perf_counter() - begun
            assert num_read == self.nbytes, (num_read, self.nbytes)
            return seconds
        except OSError as error:
            raise ConfigError(
                f"`{self.paths[0].parent}` cannot be read with O_DIRECT: {error.strerror}",
                hint="give `--folder` on a disk",
            ) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


class LoadBench:
    """Loads a checkpoint's experts.

    Args:
        folder: a checkpoint whose files are little else than experts.
        device: of slots; on CUDA the arena is page-locked.
        num_threads: of loading and of reading plainly.
    """

    def __init__(self, folder: Path, *, device: torch.device, num_threads: int) -> None:
        meta = build_meta(read_config(folder))
        self._keys = read_keys(folder, meta)
        layers = geometry_of(meta, self._keys).layers
        sizes = [layer.expert.record_bytes for layer in layers]
        pools = SlotPools.build(
            num_experts=[layer.num_experts for layer in layers],
            record_bytes=sizes,
            num_slots=dict.fromkeys(sizes, 1),
        )
        self._store = ExpertStore(layers, pools, device=device, staging_records=0)
        # Page-locked memory is there before anything is loaded; so is this.
        self._store.arena.bytes_.fill_(0)
        self._files = _Files(tuple(sorted(folder.glob("*.safetensors"))))
        self._num_threads = num_threads

    def run(self, *, case: str, repeats: int) -> Iterator[Row]:
        """Rows of loading from the disk and from the page cache.

        Raises:
            ConfigError: the file system knows no O_DIRECT.
        """
        memory = memoryview(self._store.arena.bytes_.numpy().data)
        for where, cold in (("disk", True), ("page cache", False)):
            self._prepare(memory, cold=cold)
            # In a run of its own: to ask for it time and again takes a core from loading.
            with PeakMemory() as peak:
                self._load(cold)
            plain, load = [], []
            for _ in range(repeats):
                self._prepare(memory, cold=cold)
                seconds = self._files.read(memory, num_threads=self._num_threads, direct=cold)
                plain.append(self._files.nbytes / seconds / 1e9)
                self._prepare(memory, cold=cold)
                load.append(self._load(cold))
            name = f"{case}, {self._num_threads} threads, {where}"
            against = Spread.of(plain)
            yield _row(name, "plain reads", "GB/s", against)
            ratio = Spread.of(load).p50 / against.p50
            yield _row(name, "load", "GB/s", Spread.of(load), against=("plain reads", ratio))
            most = Spread.of([float(peak.growth_bytes)])
            yield _row(name, "most memory beside the arena", "bytes", most)

    def _prepare(self, memory: memoryview, *, cold: bool) -> None:
        if cold:
            self._files.evict()
        else:
            self._files.read(memory, num_threads=self._num_threads, direct=False)

    def _load(self, cold: bool) -> float:
        report = load_experts(
            self._keys,
            destination=self._store.fields,
            num_threads=self._num_threads,
            keep_file_cache=not cold,
        )
        return report.num_bytes / report.seconds / 1e9

    def close(self) -> None:
        self._store.close()


class PeakMemory:
    """Most that this process's anonymous memory grows within a `with` block, sampled.

    Attributes:
        growth_bytes: known behind the block.
    """

    growth_bytes = 0

    def __enter__(self) -> Self:
        self._before = self._peak = _anonymous_bytes()
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._sampler.join()
        self.growth_bytes = self._peak - self._before

    def _sample(self) -> None:
        while True:
            last = self._stop.wait(_SAMPLE_SECONDS)
            self._peak = max(self._peak, _anonymous_bytes())
            if last:
                return


def _anonymous_bytes() -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match.group(1)) * 1024


def _row(
    case: str, figure: str, unit: str, spread: Spread, against: tuple[str, float] | None = None
) -> Row:
    name, ratio = against or (None, None)
    return Row(
        bench="load",
        case=case,
        figure=figure,
        unit=unit,
        **vars(spread),
        baseline=name,
        ratio_to_baseline=ratio,
    )
