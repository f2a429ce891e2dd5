"""New keys and values land in their blocks, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from hotset.kernels.attention import AttentionKernels
from kernels.support import DEVICE

BOTH = pytest.mark.parametrize(
    "kernels", [AttentionKernels("triton"), AttentionKernels("reference")], ids=lambda k: k.name
)
HEADS, KEY_DIM, VALUE_DIM, BLOCK_TOKENS = 3, 8, 5, 4


def make(num_new: int, lengths: list[int], num_blocks: int, seed: int = 0):  # type: ignore[no-untyped-def]
    """(k, v, k_pool, v_pool, table, lengths); pools are full of -1."""
    source, batch = torch.Generator().manual_seed(seed), len(lengths)
    dims = (KEY_DIM, VALUE_DIM)
    new = [torch.randn(batch, num_new, HEADS, dim, generator=source).to(DEVICE) for dim in dims]
    shape = (batch * num_blocks + 2, BLOCK_TOKENS, HEADS)
    pools = [torch.full((*shape, dim), -1.0, device=DEVICE) for dim in dims]
    table_BN = torch.randperm(shape[0], generator=source)[: batch * num_blocks]
    table_BN = table_BN.view(batch, num_blocks).int().to(DEVICE)
    return *new, *pools, table_BN, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def expected(k, v, k_pool, v_pool, table_BN, lengths_B):  # type: ignore[no-untyped-def]
    """Position by position; a later one overwrites an earlier one in the same place of a ring."""
    k_pool, v_pool = k_pool.clone(), v_pool.clone()
    for row, length in enumerate(lengths_B.tolist()):
        for token in range(k.shape[1] if length else 0):
            position = length - k.shape[1] + token
            block = table_BN[row, position // BLOCK_TOKENS % table_BN.shape[1]]
            k_pool[block, position % BLOCK_TOKENS] = k[row, token]
            v_pool[block, position % BLOCK_TOKENS] = v[row, token]
    return k_pool, v_pool


@BOTH
@pytest.mark.parametrize(
    ("num_new", "lengths", "num_blocks"),
    [
        (1, [1, 0, 5, 9], 3),  # decode: first token, padding, inside a block, a new block
        (6, [6, 11], 3),  # chunks that begin and end inside blocks
        (1, [25, 0], 2),  # decode in a ring
        (5, [30], 3),  # a chunk in a ring
        (11, [20], 2),  # more than a ring holds: its last 8
    ],
)
def test_every_token_is_in_its_place(
    kernels: AttentionKernels, num_new: int, lengths: list[int], num_blocks: int
) -> None:
    tensors = make(num_new, lengths, num_blocks)
    want = expected(*tensors)
    kernels.write(*tensors)
    assert torch.equal(tensors[2], want[0]) and torch.equal(tensors[3], want[1])


@BOTH
def test_inputs_may_be_strided_as_the_library_makes_them(kernels: AttentionKernels) -> None:
    k, v, *rest = make(4, [4, 9], 3)
    want = expected(k, v, *rest)
    heads_first = k.transpose(1, 2).contiguous().transpose(1, 2)
    in_one = torch.cat((v, v), dim=-1)[..., :VALUE_DIM]
    kernels.write(heads_first, in_one, *rest)
    assert torch.equal(rest[0], want[0]) and torch.equal(rest[1], want[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_are_copied(dtype: torch.dtype) -> None:
    """NaNs with their payload, infinities and denormals too."""
    k, v, k_pool, v_pool, *rest = make(2, [2], 2)
    k, v = (x.view(torch.int16)[..., : x.shape[-1]].contiguous().view(dtype) for x in (k, v))
    pools = [pool.to(dtype) for pool in (k_pool, v_pool)]
    AttentionKernels("triton").write(k, v, *pools, *rest)
    block = rest[0][0, 0]
    assert torch.equal(pools[0][block, :2].view(torch.int16), k[0].view(torch.int16))
    assert torch.equal(pools[1][block, :2].view(torch.int16), v[0].view(torch.int16))
