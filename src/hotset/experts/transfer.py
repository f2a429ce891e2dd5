"""Small things between host and device, neither waiting longer than it must. Knows arrays, not
meanings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Bytes that are best uploaded at a time: on an H200 that much overtakes the copies of whole groups
# of records that are queued before it, and twice as much waits for all of them.
QUICK_BYTES = 1024


def sent(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, ordered on the current stream; the host need not wait for it."""
    host = torch.from_numpy(np.array(array))  # a copy of its own, contiguous
    if device.type != "cuda":
        return host
    # The allocator of page-locked memory keeps it until the copy is done.
    return host.pin_memory().to(device, non_blocking=True)


class Downloads:
    """Copies to the host on a stream of their own."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def begin(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Sends a tensor on its way, behind what the current stream has queued by now.

        Returns:
            Waits for that, and not for what is queued later; the tensor on the host.
        """
        if tensor.device.type != "cuda":
            return lambda: tensor
        if self._stream is None:
            # Streams come from a pool by priority: at this one it is not that of the long copies
            # in the other direction, behind which it would wait.
            self._stream = torch.cuda.Stream(tensor.device, priority=-1)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        done = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            done.record(self._stream)
        # Its memory may be given away while the copy is on its way, but not before it is done.
        tensor.record_stream(self._stream)

        def wait() -> torch.Tensor:
            done.synchronize()
            return host

        return wait
