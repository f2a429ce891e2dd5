"""What the host sends goes up by a kernel that reads page-locked memory where it lies."""

from __future__ import annotations

import pytest
import torch

from hotset.kernels.upload import launch_choose, launch_upload
from kernels.support import DEVICE


def locked(host: torch.Tensor) -> torch.Tensor:
    """Where a device can read it."""
    return host.pin_memory() if DEVICE.type == "cuda" else host


@pytest.mark.parametrize("num_words", [1, 2, 511, 512, 513, 1300])
def test_words_are_copied_from_the_place_that_is_named(num_words: int) -> None:
    host = locked(torch.randint(-(2**31), 2**31, (3, 2048), dtype=torch.int32))
    places = torch.tensor([row.data_ptr() for row in host], device=DEVICE)
    out = torch.full((num_words + 5,), 7, dtype=torch.int32, device=DEVICE)
    launch_upload(places, 1, out[:num_words])
    assert torch.equal(out[:num_words].cpu(), host[1, :num_words])
    assert bool((out[num_words:] == 7).all())


def test_other_dtypes_are_words() -> None:
    host = locked(torch.tensor([2**40 + 3, -5, 2**62]))
    out = torch.zeros(1, 3, dtype=torch.int64, device=DEVICE)
    launch_upload(torch.tensor([host.data_ptr()], device=DEVICE), 0, out)
    assert torch.equal(out[0].cpu(), host)


@pytest.mark.parametrize("num_experts", [1, 5, 128, 300])
def test_addresses_are_those_given_or_the_row_s_within_a_range(num_experts: int) -> None:
    source = torch.Generator().manual_seed(num_experts)
    row = torch.randint(1, 2**62, (num_experts,), generator=source)
    given = torch.randint(1, 2**62, (num_experts,), generator=source)
    given *= torch.randint(0, 2, (num_experts,), generator=source)
    host = locked(torch.stack([torch.zeros_like(given), given]))
    places = torch.tensor([one.data_ptr() for one in host], device=DEVICE)
    for first, stop in ((0, num_experts), (num_experts // 3, num_experts // 2), (0, 0)):
        out = torch.full((num_experts + 3,), 7, device=DEVICE)
        launch_choose(places, 1, row.to(DEVICE), out[:num_experts], first=first, stop=stop)
        want = torch.zeros_like(row)
        want[first:stop] = torch.where(given == 0, row, given)[first:stop]
        assert torch.equal(out[:num_experts].cpu(), want) and bool((out[num_experts:] == 7).all())
