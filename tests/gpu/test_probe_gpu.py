"""The probe on a GPU: every rate is there, and none is faster than the bus."""

from __future__ import annotations

import pytest
import torch

from hotset.bench.probe import measure_machine
from hotset.core.machine import LINK_FIGURES, pcie_gbps
from hotset.runtime.probe import probe_machine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_rates_of_this_gpu() -> None:
    found = measure_machine(probe_machine("cuda"))
    assert {"link_zero_copy", "link_copy", "hbm", "gemm", "cpu_memory"} == set(found.figures)
    rates = found.rates(record_bytes=9 * 2**20)
    # A reading out of a cache, or a copy that was not waited for, would be faster than the bus.
    if found.link_generation is not None and found.link_width is not None:
        bus = pcie_gbps(found.link_generation, found.link_width)
        for kind in LINK_FIGURES:
            assert all(0 < point.value < bus for point in found.figures[kind])
    assert rates.hbm_gbps > rates.copy_gbps
