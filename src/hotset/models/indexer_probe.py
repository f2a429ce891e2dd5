"""Whether an indexer can choose over our pool, and its numbers.

What an indexer of single positions does is taken down while it runs (`indexers`), so that nothing
is left to compare. One of pools is written anew, and must choose what the stock code chooses, shown
with random numbers. Knows one layer's indexer; nothing of caches, masks or attention.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from hotset.core.geometry import Indexer
from hotset.kernels import attention_reference as reference
from hotset.kernels.selection import choose, chosen_slots
from hotset.models.indexers import (
    IndexKeys,
    PooledKeys,
    Selection,
    is_pooled,
    pool_keys,
    pooled_forward,
)

# Positions of a pool that a block of the KV pool holds whole ones of.
POOLS = (1, 2, 4, 8, 16, 32)
# With the top two of five pools there is a choice for most tokens.
_CHOSEN_POOLS, _NUM_POOLS = 2, 5


def shape_of(
    new: torch.Tensor | PooledKeys, q_BTHD: torch.Tensor, weights_BTH: torch.Tensor, top_k: int
) -> Indexer:
    """The numbers of an indexer that has cached `new` and asks for the top-k.

    Raises:
        ValueError: pools that blocks do not hold whole; what is wrong, as a clause.
    """
    keys = new.keys_BTD if isinstance(new, PooledKeys) else new
    num_heads, dim = q_BTHD.shape[2:]
    # It runs, so they go together.
    assert keys.shape == (*q_BTHD.shape[:2], dim) and weights_BTH.shape == q_BTHD.shape[:3]
    pool = len(new.bias_GD) if isinstance(new, PooledKeys) else 1
    if pool not in POOLS or top_k % pool:
        raise ValueError(f"chooses {top_k} positions in pools of {pool}")
    return Indexer(num_heads, dim, top_k, pool)


def choice_problem(indexer: Any) -> str:
    """Why our indexer cannot stand for a module's, as a clause; empty if it can.

    Args:
        indexer: a stock indexer, on any device.
    """
    if not is_pooled(indexer):
        return ""
    pool, num_tokens = indexer.index_kpool, _NUM_POOLS * indexer.index_kpool + 1
    generator = torch.Generator().manual_seed(0)
    twin = _random_twin(indexer, generator)
    twin.index_topk = _CHOSEN_POOLS * pool
    hidden, q_resid = (
        torch.randn(1, num_tokens, width, generator=generator)
        for width in (twin.wk.in_features, twin.wq_b.in_features)
    )
    mask = torch.ones(1, num_tokens, dtype=torch.bool)
    stock = type(indexer).forward(
        twin, hidden_states=hidden, q_resid=q_resid, attention_mask=mask, past_key_values=None
    )
    with torch.no_grad():
        ours = pooled_forward(twin, hidden, q_resid, mask, _OneText(num_tokens))
    assert ours.slots_NK is not None and ours.counts_N is not None
    for want, got, count in zip(stock[0].tolist(), ours.slots_NK, ours.counts_N, strict=True):
        if sorted(p for p in want if p >= 0) != got[:count].tolist():
            return "chooses what it attends to in a way of its own"
    return ""


def _random_twin(indexer: nn.Module, generator: torch.Generator) -> Any:
    """The module with random numbers on the CPU, in FP32, as its parameters."""
    twin = copy.deepcopy(indexer).to(torch.float32).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in twin.parameters():
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * fan_in**-0.5)
    return twin


class _OneText:
    """A cache of one text without a past: positions are places."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def update_indexer(self, new: PooledKeys, layer_idx: int) -> IndexKeys:
        def choose_from_all(
            q_BTHD: torch.Tensor, weights_BTH: torch.Tensor, top_k: int
        ) -> Selection:
            pool, table_11 = len(new.bias_GD), torch.zeros(1, 1, dtype=torch.int32)
            num_whole = self._num_tokens // pool
            keys_PGD, gates_PGD = (
                x[0, : num_whole * pool].unflatten(0, (num_whole, pool))
                for x in (new.keys_BTD, new.gates_BTD)
            )
            lengths_N = torch.arange(1, self._num_tokens + 1, dtype=torch.int32)
            counts_N = lengths_N // pool
            keys_1PD = pool_keys(keys_PGD, gates_PGD, new.bias_GD)[None]
            scores_NP = reference.index_scores(
                q_BTHD[0], weights_BTH[0], keys_1PD, table_11, counts_N
            )
            chosen_NK = choose(scores_NP, counts_N, top_k // pool)
            slots_NK, number_N = chosen_slots(
                *(chosen_NK, counts_N, lengths_N, table_11),
                pool=pool,
                block_tokens=self._num_tokens,
            )
            return Selection(0, slots_NK, number_N)

        return IndexKeys(choose_from_all)
