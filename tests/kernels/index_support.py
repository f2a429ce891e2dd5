"""What tests of indexers share: queries, keys in scattered blocks, an oracle with its bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.support import DEVICE, EPS32, Oracle


@dataclass
class Index:
    """Queries with as many candidates each as `counts` says; beyond them keys are NaN.

    Attributes:
        keys_RPD: candidates of each row of the table, dense.
        table_RN: one row for each query, or one for all.
    """

    q_NHD: torch.Tensor
    weights_NH: torch.Tensor
    keys_RPD: torch.Tensor
    pool: torch.Tensor
    table_RN: torch.Tensor
    counts_N: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.q_NHD, self.weights_NH, self.pool, self.table_RN, self.counts_N


def make_index(
    counts: tuple[int, ...],
    num_heads: int,
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    block_keys: int = 4,
    shared: bool = False,
    spare_blocks: int = 1,
    seed: int = 0,
) -> Index:
    source = torch.Generator(DEVICE).manual_seed(seed)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=source, device=DEVICE).to(dtype)

    num_rows = 1 if shared else len(counts)
    row_blocks = -(-max(counts) // block_keys) + spare_blocks
    keys_RPD = noise(num_rows, row_blocks * block_keys, dim)
    lengths = [max(counts)] if shared else list(counts)
    order = torch.randperm(num_rows * row_blocks, generator=source, device=DEVICE)
    table_RN = order.view(num_rows, row_blocks).int()
    pool = torch.full((num_rows * row_blocks + 1, block_keys, dim), torch.nan, device=DEVICE)
    pool = pool.to(dtype)
    for row, length in enumerate(lengths):
        p = torch.arange(length, device=DEVICE)
        pool[table_RN[row].long()[p // block_keys], p % block_keys] = keys_RPD[row, :length]
    weights_NH = torch.randn(len(counts), num_heads, generator=source, device=DEVICE)
    counts_N = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    q_NHD = noise(len(counts), num_heads, dim)
    return Index(q_NHD, weights_NH, keys_RPD, pool, table_RN, counts_N)


def oracle(index: Index) -> Oracle:
    """In FP64. A product of D terms errs by D eps of their absolute sum in any order, the sum over
    H heads by H eps more, and each weight's product by one."""
    (_, num_heads, dim), num_columns = index.q_NHD.shape, index.keys_RPD.shape[1]
    q, w = index.q_NHD.double(), index.weights_NH.double()
    keys = index.keys_RPD.double().expand(len(q), -1, -1)
    value = (w[:, :, None] * torch.einsum("nhd,npd->nhp", q, keys).relu()).sum(1)
    size = (w.abs()[:, :, None] * torch.einsum("nhd,npd->nhp", q.abs(), keys.abs())).sum(1)
    unseen = torch.arange(num_columns, device=q.device) >= index.counts_N[:, None]
    bound = (dim + num_heads + 1) * EPS32 * size + torch.finfo(torch.float64).tiny
    # -inf minus -inf is no number: what is unseen is compared apart.
    return Oracle(value.masked_fill(unseen, 0), bound)


def seen(index: Index, scores_NP: torch.Tensor) -> torch.Tensor:
    """The scores, with 0 for what is unseen, which must be -inf."""
    columns = torch.arange(scores_NP.shape[1], device=scores_NP.device)
    unseen = columns >= index.counts_N[:, None]
    assert (scores_NP[unseen] == -torch.inf).all()
    return scores_NP.masked_fill(unseen, 0)
