"""What tests of attention over latents share.

Rows, blocks, oracle and bounds are those of ordinary attention with one head of keys, whose values
are the first columns of the keys.
"""

from __future__ import annotations

import torch

from hotset.kernels.attention import AttentionKernels
from kernels.attention_support import Laid, Rows, Shape, make_rows


def latent_shape(
    lengths: tuple[int, ...],
    num_heads: int,
    rank: int,
    rope: int,
    dtype: torch.dtype = torch.float32,
    **others: int,
) -> Shape:
    """With scores of order 1."""
    width = rank + rope
    scale = width**-0.5
    return Shape(lengths, num_heads, 1, width, rank, dtype=dtype, scale=scale, **others)  # type: ignore[arg-type]


def latent_rows(shape: Shape, seed: int = 0) -> Rows:
    rows = make_rows(shape, seed)
    rows.v_BPHD = rows.k_BPHD[..., : shape.value_dim].contiguous()
    return rows


def decode_latents(
    kernels: AttentionKernels, rows: Rows, laid: Laid, *, many: bool = False
) -> torch.Tensor:
    rank = rows.shape.value_dim
    return kernels.decode_latents(
        rows.q_BQD[..., :rank],
        rows.q_BQD[..., rank:],
        laid.v_pool,
        laid.k_pool[..., rank:].contiguous(),
        laid.block_table_BN,
        laid.lengths_B,
        scale=rows.shape.scale,
        sinks_Q=rows.sinks_Q,
        many=many,
    )
