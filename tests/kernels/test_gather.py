"""Copying records between addresses: every byte, nothing beside it, absent ones skipped."""

from __future__ import annotations

import pytest
import torch

from hotset.core.record import ALIGN_BYTES
from hotset.kernels.copy_kernel import launch_copy
from hotset.kernels.gather import copy_records, gather_records
from kernels.support import DEVICE, addresses_of

SIZES = pytest.mark.parametrize("nbytes", [ALIGN_BYTES, 16384, 3 * 16384, 16384 + 5 * ALIGN_BYTES])


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, device=DEVICE)


@SIZES
@pytest.mark.parametrize("copy", [copy_records, launch_copy])
def test_copies_exactly_the_bytes(copy, nbytes: int) -> None:
    source, target = random_bytes(5, nbytes), random_bytes(7, nbytes)
    before = target.clone()
    order = torch.tensor([4, 1, 0, 3, 2], device=DEVICE)
    targets_N = addresses_of(target)[1:6].contiguous()
    copy(addresses_of(source)[order], targets_N, nbytes)
    assert torch.equal(target[1:6], source[order])
    assert torch.equal(target[[0, 6]], before[[0, 6]])


@pytest.mark.parametrize("copy", [copy_records, launch_copy])
def test_address_0_is_skipped(copy) -> None:
    source, target = random_bytes(3, 256), random_bytes(3, 256)
    before = target.clone()
    sources_N, targets_N = addresses_of(source), addresses_of(target)
    sources_N[0], targets_N[1] = 0, 0
    copy(sources_N, targets_N, 256)
    assert torch.equal(target[:2], before[:2])
    assert torch.equal(target[2], source[2])


@SIZES
def test_gather(nbytes: int) -> None:
    source = random_bytes(4, nbytes)
    addresses_N = addresses_of(source)[[3, 0, 3]]
    assert torch.equal(gather_records(addresses_N, nbytes), source[[3, 0, 3]])
    out = random_bytes(3, nbytes)
    assert gather_records(addresses_N, nbytes, out) is out
    assert torch.equal(out, source[[3, 0, 3]])


def test_gather_of_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert gather_records(none, 128).shape == (0, 128)
    launch_copy(none, none, 128)
