"""From scores of candidates to the places of the chosen positions, in plain torch on any device.

Of equal scores the earlier candidate is chosen, so that what is chosen depends on the scores alone,
not on how a device sorts or what else it sorts. Nothing waits for the device, and all shapes come
from shapes, so that a step can be captured. Knows scores and block tables; no queries or keys.
"""

from __future__ import annotations

import torch


def choose(scores_NP: torch.Tensor, counts_N: torch.Tensor, top_k: int) -> torch.Tensor:
    """Candidates of each query with the highest scores, ascending: int64 [N, min(top_k, P)].

    Where a query has fewer candidates, all of them come first, and then entries that are P.

    Args:
        scores_NP: FP32, no NaN.
        counts_N: int32, candidates of each query: its first ones.
    """
    num_columns = scores_NP.shape[1]
    column_P = torch.arange(num_columns, device=scores_NP.device)
    # As integers of the same order, with the column below them: no two are equal.
    bits_NP = scores_NP.view(torch.int32)
    ordered_NP = (bits_NP ^ (bits_NP >> 31 & 0x7FFFFFFF)).long()
    keys_NP = (ordered_NP << 32) + (num_columns - column_P)
    keys_NP = keys_NP.masked_fill(column_P >= counts_N[:, None], torch.iinfo(torch.int64).min)
    chosen_NK = keys_NP.topk(min(top_k, num_columns), dim=1, sorted=False).indices
    chosen_NK = chosen_NK.masked_fill(chosen_NK >= counts_N[:, None], num_columns)
    return chosen_NK.sort(dim=1).values


def chosen_slots(
    chosen_NK: torch.Tensor,
    counts_N: torch.Tensor,
    lengths_N: torch.Tensor,
    table_RN: torch.Tensor,
    *,
    pool: int,
    block_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the chosen positions lie, ascending, as a block table of blocks of one token.

    Args:
        chosen_NK: as `choose` returns them.
        counts_N: int32, candidates of each query.
        lengths_N: int32, positions that it sees, its own included; 0 for padding.
        table_RN: int32 block ids, a row for each query or one row for all.
        pool: positions of a candidate; those behind the last whole pool are chosen in any case.
        block_tokens: tokens of a block.

    Returns:
        int32 [N, K * pool + pool - 1], slots (tokens of the whole pool), the first of which are
        chosen, and int32 [N]: how many.
    """
    most = chosen_NK.shape[1]
    whole_N1 = (counts_N.clamp(max=most) * pool)[:, None]
    if pool > 1:
        j = torch.arange(most * pool + pool - 1, device=chosen_NK.device)
        of_pools = chosen_NK[:, (j // pool).clamp(max=most - 1)] * pool + j % pool
        behind = (counts_N * pool)[:, None] + (j - whole_N1)
        positions_NK = torch.where(j < whole_N1, of_pools, behind)
    else:
        positions_NK = chosen_NK
    blocks_NK = (positions_NK // block_tokens).clamp(0, table_RN.shape[1] - 1)
    ids_NK = table_RN.expand(len(chosen_NK), -1).gather(1, blocks_NK)
    slots_NK = ids_NK * block_tokens + (positions_NK % block_tokens).int()
    number_N = whole_N1[:, 0] + (lengths_N - counts_N * pool)
    return slots_NK.int(), number_N.int()
