"""Rows of a step without a sequence route nowhere; the others' ids are as they were."""

from __future__ import annotations

import pytest
import torch

from hotset.kernels.padding import launch_mask_padding, mask_padding, mask_padding_reference
from kernels.support import DEVICE


@pytest.mark.parametrize(("num_rows", "top_k"), [(1, 1), (2, 8), (8, 6), (64, 10)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_as_the_reference(num_rows: int, top_k: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(num_rows)
    ids_BK = torch.randint(0, 128, (num_rows, top_k), generator=source).to(dtype).to(DEVICE)
    lengths_B = torch.randint(0, 2, (num_rows,), generator=source, dtype=torch.int32).to(DEVICE)
    lengths_B *= 17
    lengths_B[0] = 0
    want = mask_padding_reference(ids_BK, lengths_B)
    got = launch_mask_padding(ids_BK, lengths_B)
    assert got.dtype == dtype and got.is_contiguous()
    assert torch.equal(got, want)
    assert torch.equal(mask_padding(ids_BK, lengths_B), want)
    assert (got[lengths_B == 0] == -1).all() and torch.equal(
        got[lengths_B > 0], ids_BK[lengths_B > 0]
    )


def test_columns_of_a_wider_tensor() -> None:
    wide = torch.arange(40, device=DEVICE).view(4, 10)
    lengths_B = torch.tensor([3, 0, 1, 9], dtype=torch.int32, device=DEVICE)
    for ids_BK in (wide[:, :4], wide[:, 1::3], wide.T[:4, :3]):
        got = launch_mask_padding(ids_BK, lengths_B)
        assert torch.equal(got, mask_padding_reference(ids_BK, lengths_B))
    # Control: another length is seen.
    assert not torch.equal(got, mask_padding_reference(ids_BK, lengths_B.flip(0)))
