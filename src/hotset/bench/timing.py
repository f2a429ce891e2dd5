"""Timing on a device: events around captured graphs, medians of repeats. Knows no models."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def time_ms(
    run: Callable[[], object], *, device: torch.device, repeats: int = 9, warmup: int = 2
) -> list[float]:
    """Milliseconds of each of `repeats` runs.

    On CUDA between events on the current stream, each run after the previous one is done; on a
    CPU by the wall clock.
    """
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            before = time.perf_counter()
            run()
            times.append((time.perf_counter() - before) * 1e3)
    return times


def capture(run: Callable[[], object], *, device: torch.device) -> Callable[[], object]:
    """`run` as one CUDA graph, to take launch gaps out; on a CPU `run` itself."""
    if device.type != "cuda":
        return run
    run()  # compiles kernels, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
