"""Belady's bound: the hits of a cache that knows the future and may decline to admit.

Knows ids and slots; refuses to know policies. After each step it keeps, of the residents and the
experts just routed, the ones that are needed again soonest; no policy with the same slots and the
same start has more hits. L. A. Belady, A study of replacement algorithms (1966), with bypass.

Letters: T tokens, L layers, K top-k, E experts, Q sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotset.core.slot_pools import BoolArray, IntArray

NEVER = np.iinfo(np.int64).max - 1
"""Next use of an expert that is not needed any more; above it lies only `no resident`."""


def next_uses(ids_TLK: IntArray, num_experts: int) -> tuple[IntArray, IntArray]:
    """For each use the token at which the same layer uses the expert again.

    Args:
        ids_TLK: distinct ids per token and layer, -1 for padding.

    Returns:
        [T, L, K] the next use of each, `NEVER` for the last; [L, E] the first use of each expert.
    """
    num_tokens, num_layers, _ = ids_TLK.shape
    following = np.full(ids_TLK.shape, NEVER, dtype=np.int64)
    # One cell more per layer, which swallows padding.
    seen = np.full((num_layers, num_experts + 1), NEVER, dtype=np.int64)
    row = np.arange(num_layers)[:, None]
    for token in range(num_tokens - 1, -1, -1):
        ids = ids_TLK[token]
        following[token] = seen[row, ids]
        seen[row, ids] = token
    return following, seen[:, :num_experts]


def belady(sequences: Sequence[IntArray], start: BoolArray) -> IntArray:
    """Hits of the best possible cache, one sequence after another.

    Args:
        sequences: ids [T, L, K] each, distinct per token and layer, -1 for padding.
        start: [C, L, E] residents before the first token, for C caches side by side; how many
            slots a layer has is how many residents it starts with.

    Returns:
        [Q, C, L] int64 hits per sequence.
    """
    num_caches, num_layers, num_experts = start.shape
    ids_TLK = np.concatenate(list(sequences))
    following, first = next_uses(ids_TLK, num_experts)
    # Next use of residents; -1 for the others, so that argmax finds the one needed last.
    resident = np.where(start, first, -1).reshape(-1, num_experts)
    resident = np.concatenate([resident, np.full((len(resident), 1), -1)], axis=1)
    row = np.arange(len(resident))
    ends = np.cumsum([len(ids) for ids in sequences])
    hits, count, sequence = [], np.zeros(len(resident), dtype=np.int64), 0
    for token in range(len(ids_TLK)):
        ids = np.tile(ids_TLK[token], (num_caches, 1))
        use = np.tile(following[token], (num_caches, 1))
        hit = resident[row[:, None], ids] >= 0
        count += np.count_nonzero(hit, axis=1)
        layer, column = np.nonzero(hit)
        resident[layer, ids[layer, column]] = use[layer, column]
        _admit(resident, ids, use, ~hit & (ids >= 0))
        if token + 1 == ends[sequence]:
            hits.append(count.reshape(num_caches, num_layers).copy())
            count[:] = 0
            sequence += 1
    return np.stack(hits)


def _admit(resident: IntArray, ids_LK: IntArray, use_LK: IntArray, missing_LK: BoolArray) -> None:
    """Each missing expert in turn takes the place of the resident needed last, if needed sooner."""
    for column in range(ids_LK.shape[1]):
        layer = np.flatnonzero(missing_LK[:, column])
        victim = resident[layer].argmax(axis=1)
        better = use_LK[layer, column] < resident[layer, victim]
        layer, victim = layer[better], victim[better]
        resident[layer, victim] = -1
        resident[layer, ids_LK[layer, column]] = use_LK[layer, column]
