"""Loading keeps no second copy of the experts: anonymous memory and page cache, measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from memory_of_loading import write_checkpoint

from checkpoints import empty_records, open_checkpoint
from hotset.checkpoint import loader
from hotset.checkpoint.loader import load_experts
from tiny import save_tiny, tiny_config

MIB = 2**20


def test_host_memory_peaks_at_the_arena_and_little_more(tmp_path: Path) -> None:
    """In a process of its own, so that no earlier test's free memory hides the growth.

    Beside the arena there may be one shard (9 MiB) and 24 MiB for what threads, the allocator and
    imports made late hold. The control reads all shards (72 MiB) before it copies them.
    """
    write_checkpoint(tmp_path)
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(tests / "unit" / "memory_of_loading.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    arena_bytes = measured["arena_bytes"]
    limit = arena_bytes + 9 * MIB + 24 * MIB
    # The arena is new memory that is written in full; less growth would mean a broken measurement.
    assert arena_bytes <= measured["streamed_bytes"] <= limit, measured
    assert measured["control_bytes"] > limit, measured


@pytest.mark.parametrize("keep_file_cache", [False, True])
def test_the_page_cache_of_a_shard_is_given_back_once_it_is_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_file_cache: bool
) -> None:
    save_tiny("mixtral", tmp_path)
    opened = open_checkpoint(tmp_path, tiny_config("mixtral"))
    records = empty_records(opened.params, torch.float32)
    events: list[str] = []
    real_read, real_open = os.preadv, os.open
    names: dict[int, str] = {}

    def opens(path: str, flags: int) -> int:
        descriptor = real_open(path, flags)
        names[descriptor] = Path(path).name
        return descriptor

    def reads(descriptor: int, *arguments: object) -> int:
        events.append(names[descriptor])
        return real_read(descriptor, *arguments)

    monkeypatch.setattr(loader, "_BATCH_BYTES", 1)  # the whole model would be one
    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "preadv", reads)
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda descriptor, *advice: events.append(f"{names[descriptor]} {advice}"),
    )
    load_experts(
        opened.key_map,
        destination=lambda layer, expert: records[layer, expert],
        num_threads=1,
        keep_file_cache=keep_file_cache,
    )
    shards = sorted({piece.entry.file.name for piece in opened.key_map.pieces})
    assert len(shards) > 2
    # Said of each as it is opened: it is read forwards.
    assert events[0].endswith(f"{os.POSIX_FADV_SEQUENTIAL})")
    given_back = [event for event in events if event.endswith(f"{os.POSIX_FADV_DONTNEED})")]
    if keep_file_cache:
        assert not given_back
        return
    assert given_back == [f"{shard} (0, 0, {os.POSIX_FADV_DONTNEED})" for shard in shards]
    # Each before the next shard is begun, not all at the end.
    for shard, event in zip(shards[1:], given_back, strict=False):
        assert events.index(event) < events.index(shard)
