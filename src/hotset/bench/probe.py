"""Measures this machine for plans and predictions, and keeps the result for some weeks.

Every figure says how it was taken. What there is no hardware for (a link without a GPU) has no
figure; nothing is assumed in its place.
"""

from __future__ import annotations

import datetime
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from hotset.bench.rates import link_rates, read_rate
from hotset.bench.timing import time_ms
from hotset.core.errors import ConfigError
from hotset.core.geometry import ExpertSpec, Gate, GateForm, MoELayer
from hotset.core.hardware import Machine
from hotset.core.machine import Figure, MachineDescription
from hotset.core.units import MIB, format_bytes
from hotset.experts.arena import HostArena
from hotset.runtime.known_rates import kept_file, kept_rates
from hotset.runtime.link import read_link
from hotset.runtime.probe import choose_device, probe_machine

logger = logging.getLogger(__name__)

DISK_BYTES = 256 * MIB

# Intermediate sizes of BF16 experts with a hidden size of 2048: records of 1.5 and 9 MiB.
_RECORDS = (128, 768)
_LINK_BYTES = 512 * MIB


def describe_machine(
    device: str | None = None, *, fresh: bool = False, folder: Path | None = None
) -> MachineDescription:
    """This machine, with rates from the cache where they are recent enough, measured otherwise.

    Sizes are always those of now.

    Args:
        fresh: measure even so.
        folder: where it is kept; default `known_rates.kept_folder`.

    Raises:
        HardwareError: CUDA is asked for and not there, or does not let memory be page-locked.
    """
    machine = probe_machine(device)
    file = kept_file(machine, folder)
    known = None if fresh else kept_rates(machine, folder=folder)
    if known is None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            known = measure_machine(machine, disk=file.parent)
            known.save(file)
        except (OSError, ConfigError) as error:
            logger.warning("measured rates are not kept, `%s` cannot be written: %s", file, error)
            known = known or measure_machine(machine)
    return replace(known, machine=machine)


def measure_machine(machine: Machine, *, disk: Path | None = None) -> MachineDescription:
    """Measures all rates of the machine that this process runs on; some seconds.

    Args:
        disk: a folder whose disk is measured, with a file that is removed again.

    Raises:
        OSError: nothing can be written there.
    """
    device = choose_device(machine.device)
    figures: dict[str, tuple[Figure, ...]] = {}
    link = None
    if device.type == "cuda":
        points = list(_link_figures(device))
        figures["link_zero_copy"] = tuple(zero_copy for zero_copy, _ in points)
        figures["link_copy"] = tuple(copied for _, copied in points)
        link = read_link()  # behind the copies: an idle link slows down
        figures["hbm"] = (_figure(read_rate(device), "best of 5 maximum reductions over 4 GiB"),)
    host = "best of 5 maximum reductions over 256 MiB by all cores"
    figures["cpu_memory"] = (_figure(read_rate(torch.device("cpu")), host),)
    figures["gemm"] = (_gemm_figure(device),)
    if disk is not None:
        figures["disk"] = (_disk_figure(disk),)
    return MachineDescription(
        name=f"{machine.device_name}, {format_bytes(machine.host.total_bytes)} RAM",
        machine=machine,
        link_generation=None if link is None else link.generation,
        link_width=None if link is None else link.width,
        figures=figures,
    )


def _link_figures(device: torch.device) -> Iterator[tuple[Figure, Figure]]:
    """Zero-copy and copy-engine rates at each record size."""
    for intermediate in _RECORDS:
        expert = ExpertSpec.build(
            hidden=2048,
            intermediate=intermediate,
            gate=Gate(GateForm.PLAIN),
            has_bias=False,
            dtype="bfloat16",
        )
        count = _LINK_BYTES // expert.record_bytes
        layer = MoELayer(name="probe", num_experts=count, top_k=1, expert=expert)
        with closing(HostArena([layer], pinned=True)) as arena:
            zero_copy, copied = link_rates(arena, layer, device=device)
        size = expert.record_bytes
        yield (
            _figure(zero_copy, f"best of 5 gathers of {count} records in place", record=size),
            _figure(copied, f"best of 5 copies of {format_bytes(count * size)}", record=size),
        )


def _gemm_figure(device: torch.device) -> Figure:
    size = 8192 if device.type == "cuda" else 512
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    best = min(time_ms(lambda: left @ left, device=device, repeats=5))
    return _figure(2 * size**3 / best / 1e9, f"best of 5 BF16 products of {size} x {size}")


def _disk_figure(folder: Path) -> Figure:
    """Reading a file that the page cache was told to forget."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(DISK_BYTES // (4 * MIB)):
            file.write(os.urandom(4 * MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        before = time.perf_counter()
        while file.read(4 * MIB):
            pass
        seconds = time.perf_counter() - before
    how = f"one reading of {format_bytes(DISK_BYTES)} in `{folder}`, dropped from the page cache"
    return _figure(DISK_BYTES / seconds / 1e9, how)


def _figure(value: float, how: str, *, record: int | None = None) -> Figure:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    value = float(f"{value:.4g}")
    return Figure(value=value, origin="measured", how=how, date=today, record_bytes=record)
