"""What this process really takes, on the device and in host memory, and words for a step that runs
out of it. Measures, plans nothing."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from hotset.core.errors import RequestError, explain_out_of_memory
from hotset.core.plan import MemoryPlan
from hotset.core.units import format_bytes

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


def room_for_step(plan: MemoryPlan, num_tokens: int) -> AbstractContextManager[None]:
    """Within the block memory that runs out is called what it is: that of a step of so many
    tokens."""
    lines = ("activations", "attention workspace", "expert workspace", "KV cache")
    planned = ", ".join(f"{name} {format_bytes(plan.device[name])}" for name in lines)
    return explain_out_of_memory(
        f"a step of {num_tokens} tokens (planned: {planned})",
        hint="other programs may have taken memory since the start; lower `--prefill-chunk` or "
        "`--context`, or set a smaller `--vram`",
        error=RequestError,
    )
