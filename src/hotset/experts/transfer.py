"""Bytes between host and device, neither waiting longer than it must: small arrays either way, and
copies by the driver. Knows arrays and addresses, not meanings."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotset.core.errors import HardwareError
from hotset.core.units import format_bytes

# What goes up without the copy engine, which is busy with records: arrays of up to so many bytes,
# and so many of them before the host waits for the first.
PLACE_BYTES, _NUM_PLACES = 16 * 1024, 128


def sent(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, ordered on the current stream; the host need not wait for it."""
    if device.type != "cuda":
        return torch.from_numpy(np.array(array))  # a copy of its own, contiguous
    out = torch.empty(array.shape, dtype=_torch_dtype(array.dtype), device=device)
    send(array, out)
    return out


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype


def send(array: NDArray[Any], out: torch.Tensor) -> None:
    """`sent` into a contiguous tensor of the array's shape and dtype."""
    array = np.asarray(array, order="C")
    assert array.shape == out.shape and out.is_contiguous(), (array.shape, out.shape)
    assert _torch_dtype(array.dtype) == out.dtype, (array.dtype, out.dtype)
    whole_words = array.nbytes % 4 == 0 and out.data_ptr() % 4 == 0
    if out.device.type != "cuda":
        out.copy_(torch.from_numpy(array))
    elif 0 < array.nbytes <= PLACE_BYTES and whole_words:
        from hotset.kernels.upload import launch_upload

        with uploads(out.device).place(array) as where:
            launch_upload(*where, out)
    else:
        # The allocator of page-locked memory keeps it until the copy is done.
        out.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)


def copy_up(source: int, target: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
    """Copies page-locked memory to the device by the copy engine, ordered on a stream.

    The driver's own call: a group of records is dozens of such copies, and what torch does around
    each takes the host several times as long.

    Args:
        source, target: addresses, on the host and on the device of the stream, the current one.

    Raises:
        HardwareError: the driver refuses.
    """
    code = cuda_driver().cuMemcpyHtoDAsync_v2(target, source, num_bytes, stream.cuda_stream)
    if code != 0:
        raise HardwareError(
            f"the driver refuses to copy {format_bytes(num_bytes)} to the device (error {code})",
            hint="an earlier kernel may have failed; `hotset doctor` looks at the machine",
        )


@cache
def cuda_driver() -> ctypes.CDLL:
    """Of the current context: what torch does not offer."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyHtoDAsync_v2.argtypes = [
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ]
    return driver


class Uploads:
    """Page-locked memory from which kernels take what the host gives them (`kernels.upload`).

    All of a device's threads take places in turn, so who runs far ahead of the device lets others
    wait with him.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(_NUM_PLACES, PLACE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._host = self._memory.numpy()
        places = np.arange(_NUM_PLACES, dtype=np.int64) * PLACE_BYTES + self._memory.data_ptr()
        self._places_N = torch.from_numpy(places).to(device)
        self._read = [torch.cuda.Event() for _ in range(_NUM_PLACES)]
        self._next, self._lock = 0, threading.Lock()

    @contextmanager
    def place(self, array: NDArray[Any]) -> Iterator[tuple[torch.Tensor, int]]:
        """Puts an array where kernels can read it that are launched within the block, on the
        device's current stream.

        Args:
            array: contiguous, of at most `PLACE_BYTES`.

        Yields:
            Addresses of all places, int64 [N] on the device, and which of them it is.
        """
        with self._lock, torch.cuda.device(self._device):
            index, self._next = self._next, (self._next + 1) % _NUM_PLACES
            self._read[index].synchronize()  # at once, if it was never used
            self._host[index, : array.nbytes] = array.reshape(-1).view(np.uint8)
            try:
                yield self._places_N, index
            finally:  # it may have been launched, whatever happened since
                self._read[index].record()


_UPLOADS: dict[torch.device, Uploads] = {}
_MAKES_UPLOADS = threading.Lock()


def uploads(device: torch.device) -> Uploads:
    """Those of a device: made once, since kernels still read the memory of what is dropped."""
    with _MAKES_UPLOADS:
        if device not in _UPLOADS:
            _UPLOADS[device] = Uploads(device)
        return _UPLOADS[device]


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
