"""What the attention tests share: rows laid out in scattered blocks, an oracle, its error bounds.

The oracle attends to the rows themselves, in FP64, and never looks at a pool. For every value it
knows how far a right FP32 implementation may be from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hotset.kernels.attention import AttentionKernels, ring_blocks
from kernels.support import DEVICE, EPS32, Oracle


@dataclass(frozen=True)
class Shape:
    """One attention layer and the rows to decode."""

    lengths: tuple[int, ...] = (70, 0, 33)
    num_heads: int = 8
    num_kv_heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    block_tokens: int = 16
    spare_blocks: int = 0  # columns of the block table beyond what the rows need
    scale: float = 0.3

    @property
    def row_blocks(self) -> int:
        """Columns of the block table: all blocks of the longest row, or the window's ring."""
        whole = -(-max(self.lengths) // self.block_tokens)
        if self.window is None:
            return whole + self.spare_blocks
        return ring_blocks(self.window, self.block_tokens) + self.spare_blocks


@dataclass
class Rows:
    """Queries, keys and values of all rows, dense: `k_BPHD[b, p]` is position p of row b."""

    shape: Shape
    q_BQD: torch.Tensor
    k_BPHD: torch.Tensor
    v_BPHD: torch.Tensor
    sinks_Q: torch.Tensor | None

    def only(self, row: int) -> Rows:
        """One of the rows alone."""
        one = slice(row, row + 1)
        shape = replace(self.shape, lengths=self.shape.lengths[one])
        return Rows(shape, self.q_BQD[one], self.k_BPHD[one], self.v_BPHD[one], self.sinks_Q)

    def with_shape(self, **changes: object) -> Rows:
        """The same numbers in another layout."""
        return replace(self, shape=replace(self.shape, **changes))  # type: ignore[arg-type]


def make_rows(shape: Shape, seed: int = 0) -> Rows:
    source = torch.Generator().manual_seed(seed)
    batch, longest = len(shape.lengths), max(shape.lengths)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=source).to(shape.dtype).to(DEVICE)

    return Rows(
        shape,
        noise(batch, shape.num_heads, shape.key_dim),
        noise(batch, longest, shape.num_kv_heads, shape.key_dim),
        noise(batch, longest, shape.num_kv_heads, shape.value_dim),
        noise(shape.num_heads) if shape.sinks else None,
    )


@dataclass
class Laid:
    """Pools in which everything that no row owns, or that a ring has lost, is NaN."""

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    block_table_BN: torch.Tensor
    lengths_B: torch.Tensor


def lay_out(rows: Rows, seed: int = 0) -> Laid:
    """Puts the rows into blocks at random places."""
    shape, source = rows.shape, torch.Generator().manual_seed(seed)
    batch, columns = len(shape.lengths), shape.row_blocks
    num_blocks = batch * columns + 3
    table_BN = torch.randperm(num_blocks, generator=source)[: batch * columns].view(batch, columns)
    pools = [
        x.new_full((num_blocks, shape.block_tokens, *x.shape[2:]), torch.nan)
        for x in (rows.k_BPHD, rows.v_BPHD)
    ]
    for row, length in enumerate(shape.lengths):
        p = torch.arange(max(0, length - columns * shape.block_tokens), length)
        place = (table_BN[row, p // shape.block_tokens % columns], p % shape.block_tokens)
        for pool, dense in zip(pools, (rows.k_BPHD, rows.v_BPHD), strict=True):
            pool[place] = dense[row, p]
    lengths_B = torch.tensor(shape.lengths, dtype=torch.int32)
    return Laid(*pools, table_BN.int().to(DEVICE), lengths_B.to(DEVICE))


def decode(kernels: AttentionKernels, rows: Rows, laid: Laid) -> torch.Tensor:
    shape = rows.shape
    return kernels.decode(
        rows.q_BQD,
        laid.k_pool,
        laid.v_pool,
        laid.block_table_BN,
        laid.lengths_B,
        scale=shape.scale,
        window=shape.window,
        softcap=shape.softcap,
        sinks_Q=rows.sinks_Q,
    )


def oracle(rows: Rows) -> Oracle:
    """The formula in FP64; rows of length 0 are 0 and must be exactly that."""
    shape = rows.shape
    size = (len(shape.lengths), shape.num_heads, shape.value_dim)
    value = torch.zeros(size, dtype=torch.float64, device=DEVICE)
    bound = torch.full_like(value, torch.finfo(torch.float64).tiny)
    group = shape.num_heads // shape.num_kv_heads
    for row, length in enumerate(shape.lengths):
        first = 0 if shape.window is None else max(0, length - shape.window)
        for head in range(shape.num_heads if length else 0):
            k_PD, v_PD = (
                dense[row, first:length, head // group].double()
                for dense in (rows.k_BPHD, rows.v_BPHD)
            )
            sink = None if rows.sinks_Q is None else rows.sinks_Q[head].double()
            value[row, head], slack = _one_head(
                rows.q_BQD[row, head].double(), k_PD, v_PD, sink, shape
            )
            bound[row, head] += slack
    return Oracle(value, bound)


def _one_head(
    q_D: torch.Tensor,
    k_PD: torch.Tensor,
    v_PD: torch.Tensor,
    sink: torch.Tensor | None,
    shape: Shape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, bound) of one query.

    A score errs by a sum of D products in FP32, sqrt(D) * eps * scale * sum |q||k|, and a few eps
    of itself (scale, cap, tanh); its exponential further by what s - max is rounded by, which is
    eps of both, and a few eps of its own. So weight j errs by a factor 1 + r_j, and out, a weighted
    mean, by sum w_j r_j (|v_j| + |out|) / sum w. The two sums of n terms err by sqrt(n) * eps of
    their magnitudes. Weights that meet v in a 16-bit dtype do so as two numbers of it, which leaves
    (eps/2)^2 of each, and in FP16 at least 2^-25, half of its smallest step. Rounded once.
    """
    s_P = shape.scale * (k_PD @ q_D)
    ds_P = EPS32 * (shape.key_dim**0.5 * shape.scale * (k_PD.abs() @ q_D.abs()))
    if shape.softcap is not None:
        s_P = shape.softcap * torch.tanh(s_P / shape.softcap)
    if sink is not None:  # one more position, whose value is 0
        s_P = torch.cat((s_P, sink[None]))
        ds_P = torch.cat((ds_P, ds_P.new_zeros(1)))
        v_PD = torch.cat((v_PD, v_PD.new_zeros(1, v_PD.shape[1])))
    top = s_P.max()
    w_P = torch.exp(s_P - top)
    half_unit = torch.finfo(shape.dtype).eps / 2
    split = half_unit**2 if shape.dtype != torch.float32 else 0.0
    r_P = ds_P + EPS32 * (8 + 8 * s_P.abs() + 2 * top.abs()) + split
    out_D = w_P @ v_PD / w_P.sum()
    reach_PD = v_PD.abs() + out_D.abs()
    error = (w_P * r_P) @ reach_PD + EPS32 * len(w_P) ** 0.5 * (w_P @ reach_PD)
    if shape.dtype == torch.float16:
        error = error + 2.0**-25 * v_PD.abs().sum(0)
    return out_D, error / w_P.sum() + half_unit * out_D.abs()
