"""The host arena: every expert's record in anonymous mappings, page-locked for a GPU.

Knows addresses and bytes. What a record means, who has a slot and when bytes move is not its
business. On CUDA the mapping is registered at its exact size, so a kernel can read a record at
its own address; torch's pinned allocator would round up to a power of two (1.9 times the bytes
in practice). There is no pageable fallback: reading it would be ten times slower in silence.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch

from hotset.core.errors import CapacityError, HardwareError
from hotset.core.geometry import MoELayer
from hotset.core.record import align_up
from hotset.core.units import format_bytes
from hotset.experts.transfer import cuda_driver

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_REGISTER_PORTABLE = 1  # visible to every context, should there be more than one GPU
_REGISTER_MAPPED = 2  # readable by kernels


class HostArena:
    """Records of all layers, one after the other, expert by expert.

    Neighbouring experts of a layer are neighbours in memory, so that a group of them moves in one
    copy. The memory is released when the arena is closed and the last view of it is gone.

    Args:
        layers: the MoE layers; the arena holds `layer.num_experts` records of each.
        pinned: register the memory with CUDA.
        banks: of `make_bank`, one a layer, where records were written before all layers were
            known. By default one mapping is made for all layers together.

    Raises:
        CapacityError: the mapping cannot be had.
        HardwareError: CUDA refuses to register it.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        *,
        pinned: bool,
        banks: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._strides = [layer.expert.record_bytes for layer in layers]
        sizes = [layer.num_experts * layer.expert.record_bytes for layer in layers]
        self._starts = [0, *accumulate(sizes)][:-1]
        # Tensors and their views are all that holds a mapping, so it goes with the last of them.
        if banks is None:
            self.nbytes = align_up(sum(sizes), mmap.PAGESIZE)
            self.bytes_: torch.Tensor = torch.frombuffer(_map(self.nbytes), dtype=torch.uint8)
            self._banks: list[torch.Tensor] = list(self.bytes_[: sum(sizes)].split(sizes))
            mappings = [self.bytes_]
        else:
            assert [bank.numel() for bank in banks] == [align_up(n, mmap.PAGESIZE) for n in sizes]
            self.nbytes = sum(bank.numel() for bank in banks)
            self.bytes_ = torch.empty(0, dtype=torch.uint8)
            self._banks = mappings = list(banks)
        self._to_device = [0] * len(mappings)
        self._unregister: weakref.finalize[[list[int]], HostArena] | None = None
        if pinned:
            bases: list[int] = []
            # Also runs when the interpreter exits, whatever led there.
            self._unregister = weakref.finalize(self, _unregister, bases)
            for index, mapping in enumerate(mappings):
                base = mapping.data_ptr()
                self._to_device[index] = _register(base, mapping.numel()) - base
                bases.append(base)

    @property
    def pinned(self) -> bool:
        return self._unregister is not None and self._unregister.alive

    def offset(self, layer: int, expert: int) -> int:
        """Bytes from the start of the arena to a record, were its layers side by side."""
        return self._starts[layer] + expert * self._strides[layer]

    def address(self, layer: int, expert: int) -> int:
        """The address at which the device reads a record; on a CPU the plain one."""
        to_device = self._to_device[layer if len(self._to_device) > 1 else 0]
        base: int = self._banks[layer].data_ptr()
        return base + to_device + expert * self._strides[layer]

    def record(self, layer: int, expert: int, num_records: int = 1) -> torch.Tensor:
        """uint8 view of one record, or of `num_records` neighbours side by side."""
        stride = self._strides[layer]
        return self._banks[layer][expert * stride : (expert + num_records) * stride]

    def close(self) -> None:
        """Unregisters the memory and drops it. Safe to call twice."""
        if self._unregister is not None:
            self._unregister()
        self.bytes_ = torch.empty(0, dtype=torch.uint8)
        self._banks = []


def make_bank(num_experts: int, record_bytes: int) -> torch.Tensor:
    """Memory for the records of one layer: uint8, whole pages, nothing of it taken before it is
    written to.

    Raises:
        CapacityError: the mapping cannot be had.
    """
    size = align_up(num_experts * record_bytes, mmap.PAGESIZE)
    return torch.frombuffer(_map(size), dtype=torch.uint8)


def _map(size: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(
            f"the host arena needs {format_bytes(size)} and the system gives none: {error}",
            hint="free host memory, or see `hotset plan MODEL` for what fits",
        ) from error
    # A forked child must not share page-locked memory: copy on write would move the parent's
    # pages from under the device.
    mapping.madvise(_MADV_DONTFORK)
    try:
        # 512 times fewer pages to lock and to translate. A kernel without huge pages says EINVAL.
        mapping.madvise(_MADV_HUGEPAGE)
    except OSError:
        return mapping
    return mapping


def _register(address: int, size: int) -> int:
    """Page-locks the range; returns the address at which the device sees it."""
    torch.cuda.init()
    torch.cuda.current_stream()  # makes the context current, which the driver call below needs
    code = int(
        torch.cuda.cudart().cudaHostRegister(address, size, _REGISTER_PORTABLE | _REGISTER_MAPPED)
    )
    if code != 0:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
        raise HardwareError(
            f"CUDA refuses to page-lock {format_bytes(size)} of host memory (error {code}); "
            f"the memlock limit is {limit}",
            hint="raise it (`ulimit -l unlimited`, in a container `--ulimit memlock=-1`); under "
            "WSL2 about half of the memory can be locked: give the VM more, or use a smaller model",
        )
    try:
        return _device_pointer(address)
    except HardwareError:
        _unregister([address])
        raise


def _device_pointer(address: int) -> int:
    pointer = ctypes.c_uint64()
    code = cuda_driver().cuMemHostGetDevicePointer_v2(
        ctypes.byref(pointer), ctypes.c_void_p(address), ctypes.c_uint(0)
    )
    if code != 0:
        raise HardwareError(
            f"the device cannot read page-locked host memory (driver error {code})",
            hint="hotset needs a CUDA device with mapped host memory",
        )
    return pointer.value


def _unregister(addresses: list[int]) -> None:
    if not addresses:  # the first one was refused
        return
    torch.cuda.synchronize()  # no copy or kernel may still be reading
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
