"""Copies whole records between addresses: from any that the device can read to any it can write.

Knows bytes, not fields. Used where bytes are compared or computed by other code (audit,
reference), and by `experts/ring` from staging buffers into slots; the expert kernels read records
in place instead.
"""

from __future__ import annotations

import ctypes

import torch

from hotset.core.record import ALIGN_BYTES


def gather_records(
    addresses_N: torch.Tensor, nbytes: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Copies N records of `nbytes` bytes into one tensor.

    Args:
        addresses_N: int64 [N], on the device that reads: VRAM or mapped host memory on CUDA,
            host memory on a CPU. Rows whose address is 0 are left as they are.
        nbytes: a multiple of `ALIGN_BYTES`.
        out: uint8 [N, nbytes], contiguous, on the same device; made when not given, and then
            rows of address 0 are zero.

    Returns:
        `out`, without waiting for the device.
    """
    num_records = addresses_N.numel()
    if out is None:
        out = torch.zeros(num_records, nbytes, dtype=torch.uint8, device=addresses_N.device)
    assert out.dtype == torch.uint8 and out.shape == (num_records, nbytes) and out.is_contiguous()
    rows_N = torch.arange(num_records, device=addresses_N.device) * nbytes + out.data_ptr()
    copy_records(addresses_N, rows_N, nbytes)
    return out


def copy_records(sources_N: torch.Tensor, targets_N: torch.Tensor, nbytes: int) -> None:
    """Copies `nbytes` bytes from each source address to the target of the same place.

    Pairs with a 0 on either side are skipped. Both are int64 [N] on one device; addresses are
    multiples of 16, and no target overlaps a source.
    """
    assert nbytes % ALIGN_BYTES == 0 and sources_N.shape == targets_N.shape
    if sources_N.is_cuda:
        from hotset.kernels.copy_kernel import launch_copy

        launch_copy(sources_N, targets_N, nbytes)
        return
    for source, target in zip(sources_N.tolist(), targets_N.tolist(), strict=True):
        if source and target:
            ctypes.memmove(target, source, nbytes)
