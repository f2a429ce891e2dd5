"""Small things from the host to the device without waiting for it. Knows arrays, not meanings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def sent(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, ordered on the current stream; the host need not wait for it."""
    host = torch.from_numpy(np.array(array))  # a copy of its own, contiguous
    if device.type != "cuda":
        return host
    # The allocator of page-locked memory keeps it until the copy is done.
    return host.pin_memory().to(device, non_blocking=True)
