"""Small things between host and device, neither waiting longer than it must. Knows arrays, not
meanings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# What goes up without the copy engine, which is busy with records: arrays of up to so many bytes,
# and so many of them before the host waits for the first.
_PLACE_BYTES, _NUM_PLACES = 16 * 1024, 128


def sent(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, ordered on the current stream; the host need not wait for it."""
    host = torch.from_numpy(np.array(array))  # a copy of its own, contiguous
    if device.type != "cuda":
        return host
    out = torch.empty_like(host, device=device)
    send(array, out)
    return out


def send(array: NDArray[Any], out: torch.Tensor) -> None:
    """`sent` into a contiguous tensor of the array's shape and dtype."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    assert host.dtype == out.dtype and host.shape == out.shape and out.is_contiguous()
    if out.device.type != "cuda":
        out.copy_(host)
    elif 0 < host.nbytes <= _PLACE_BYTES and host.nbytes % 4 == 0:
        _uploads(out.device).send(host, out)
    else:
        # The allocator of page-locked memory keeps it until the copy is done.
        out.copy_(host.pin_memory(), non_blocking=True)


class Uploads:
    """Copies to a device by kernels that read page-locked memory (`kernels.upload`).

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._host_NB = torch.empty(_NUM_PLACES, _PLACE_BYTES, dtype=torch.uint8, pin_memory=True)
        places = np.arange(_NUM_PLACES, dtype=np.int64) * _PLACE_BYTES + self._host_NB.data_ptr()
        self._places_N = torch.from_numpy(places).to(device)
        self._read = [torch.cuda.Event() for _ in range(_NUM_PLACES)]
        self._next, self._lock = 0, threading.Lock()

    def send(self, host: torch.Tensor, out: torch.Tensor) -> None:
        """Copies words into a contiguous tensor, ordered on the current stream."""
        from hotset.kernels.upload import launch_upload

        with self._lock:
            index = self._next
            self._read[index].synchronize()  # at once, if it was never used
            place = self._host_NB[index, : host.nbytes]
            place.copy_(host.reshape(-1).view(torch.uint8))
            launch_upload(self._places_N, index, out)
            self._read[index].record(torch.cuda.current_stream(out.device))
            self._next = (index + 1) % _NUM_PLACES


@cache
def _uploads(device: torch.device) -> Uploads:
    return Uploads(device)


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
