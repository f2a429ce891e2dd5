"""What this process really takes, on the device and in host memory. Measures, plans nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MemoryUse:
    """Measured bytes.

    Attributes:
        device_peak_bytes: most that torch's allocator held at once; 0 on a CPU.
        host_peak_bytes: peak resident set, file pages included.
        host_anonymous_bytes: resident memory that is not file pages, now.
    """

    device_peak_bytes: int
    host_peak_bytes: int
    host_anonymous_bytes: int


def measure(device: torch.device) -> MemoryUse:
    """Memory of this process so far."""
    status = _STATUS.read_text()
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return MemoryUse(peak, _kib(status, "VmHWM"), _kib(status, "RssAnon"))


def _kib(status: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0
