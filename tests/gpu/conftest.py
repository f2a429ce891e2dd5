"""Every test finds the device as a process of its own would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def own_peak() -> Iterator[None]:
    """Peaks of device memory are of one test: those before it are forgotten."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield
