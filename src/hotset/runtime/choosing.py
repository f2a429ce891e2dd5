"""From an indexer's queries to what each token attends to: scores, top-k, places in the pool.

A decode step chooses for all its rows at once, a prompt for a few of its tokens at a time; tokens
that see no more than may be chosen attend to everything. Knows queries and positions; where keys
lie it is told.
"""

from __future__ import annotations

import torch

from hotset.core.geometry import Indexer
from hotset.core.units import MIB
from hotset.kernels.attention import AttentionKernels
from hotset.kernels.selection import choose, chosen_slots
from hotset.models.indexers import Selection
from hotset.runtime.index_pool import IndexPool

# What tokens of a prompt that are chosen for at a time take: scores of their candidates and places
# of what is chosen, some of them in int64.
CHOOSING_BYTES = 128 * MIB
# Of a candidate: its score in FP32, integers of their order twice, and a mask.
CANDIDATE_BYTES = 4 + 2 * 8 + 1


def tokens_at_a_time(indexer: Indexer, num_candidates: int) -> int:
    """How many tokens of a prompt are chosen for at a time."""
    return max(1, CHOOSING_BYTES // choosing_bytes(indexer, num_candidates))


def choosing_bytes(indexer: Indexer, num_candidates: int) -> int:
    """What choosing for one token takes: of each chosen position three int64 at a time, and what
    sorting them takes."""
    return num_candidates * CANDIDATE_BYTES + indexer.most_chosen * 6 * 8


class Chooser:
    """Chooses for one layer.

    Args:
        index: the layer's keys.
        kernels: attention kernels.
    """

    def __init__(self, index: IndexPool, kernels: AttentionKernels) -> None:
        self.index, self.kernels = index, kernels
        self.indexer, self.block_tokens = index.indexer, index.block_tokens

    def of_rows(
        self,
        q_BTHD: torch.Tensor,
        weights_BTH: torch.Tensor,
        table_BN: torch.Tensor,
        lengths_B: torch.Tensor,
    ) -> Selection:
        """For the newest token of each row. Nothing waits for the device.

        Args:
            q_BTHD: [B, 1, H, D].
            weights_BTH: FP32 [B, 1, H].
            table_BN, lengths_B: as in `AttentionKernels.decode`.
        """
        if table_BN.shape[1] * self.block_tokens <= self.indexer.top_k:
            return Selection()
        slots_BK, counts_B = self._choose(q_BTHD[:, 0], weights_BTH[:, 0], table_BN, lengths_B)
        return Selection(0, slots_BK, counts_B)

    def of_prompt(
        self, q_BTHD: torch.Tensor, weights_BTH: torch.Tensor, table_1N: torch.Tensor, start: int
    ) -> Selection:
        """For new tokens of one row, the first of which is at position `start`."""
        num_tokens, top_k = q_BTHD.shape[1], self.indexer.top_k
        num_dense = min(num_tokens, max(0, top_k - start))
        if num_dense == num_tokens:
            return Selection(num_dense)
        used = -(-(start + num_tokens) // self.block_tokens)
        table_1N = table_1N[:, :used]
        size = tokens_at_a_time(self.indexer, used * self.block_tokens // self.indexer.pool)
        most = min(top_k, used * self.block_tokens) + self.indexer.pool - 1
        slots_NK = table_1N.new_empty(num_tokens - num_dense, most)
        counts_N = table_1N.new_empty(num_tokens - num_dense)
        for first in range(num_dense, num_tokens, size):
            of = slice(first, min(first + size, num_tokens))
            lengths_N = torch.arange(
                start + of.start + 1, start + of.stop + 1, dtype=torch.int32, device=q_BTHD.device
            )
            out = slice(of.start - num_dense, of.stop - num_dense)
            slots_NK[out], counts_N[out] = self._choose(
                q_BTHD[0, of], weights_BTH[0, of], table_1N, lengths_N
            )
        return Selection(num_dense, slots_NK, counts_N)

    def _choose(
        self,
        q_NHD: torch.Tensor,
        weights_NH: torch.Tensor,
        table_RN: torch.Tensor,
        lengths_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.indexer.pool
        counts_N = lengths_N // pool
        scores_NP = self.kernels.index_scores(
            q_NHD.to(self.index.keys.dtype),
            weights_NH.contiguous(),
            self.index.keys,
            table_RN,
            counts_N,
        )
        chosen_NK = choose(scores_NP, counts_N, self.indexer.top_k // pool)
        return chosen_slots(
            *(chosen_NK, counts_N, lengths_N, table_RN), pool=pool, block_tokens=self.block_tokens
        )
