"""Belady's bound equals exhaustive search over everything a cache could have done."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from routing import make_trace, skewed_ids

from hotset.core.belady import NEVER, belady, next_uses
from hotset.core.simulator import Condition, simulate


def exhaustive(ids: np.ndarray, start: frozenset[int]) -> int:
    """Most hits of one layer when after each step any residents and routed experts may be kept."""

    @cache
    def best(token: int, resident: frozenset[int]) -> int:
        if token == len(ids):
            return 0
        used = frozenset(int(e) for e in ids[token] if e >= 0)
        hits = len(used & resident)
        keep = combinations(sorted(used | resident), len(resident))
        return hits + max(best(token + 1, frozenset(kept)) for kept in keep)

    return best(0, start)


@pytest.mark.parametrize("slots", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_belady_is_the_best_of_all(slots, top_k):
    num_experts, num_layers = 5, 3
    ids = skewed_ids(
        num_tokens=11, num_layers=num_layers, num_experts=num_experts, top_k=top_k, seed=slots
    )
    start = np.arange(num_experts) < slots
    hits = belady([ids[:4], ids[4:]], np.tile(start, (1, num_layers, 1)))
    assert hits.shape == (2, 1, num_layers)
    want = [exhaustive(ids[:, row], frozenset(range(slots))) for row in range(num_layers)]
    assert hits.sum(axis=(0, 1)).tolist() == want
    # Control: always admitting, which is not optimal, is told apart where it can be.
    if (slots, top_k) == (2, 2):
        lru = simulate(make_trace([ids], num_experts=num_experts), [Condition("lru", 0.4)])[0]
        assert lru.hits_Q.sum() < sum(want)


def test_caches_side_by_side_and_padding():
    ids = skewed_ids(num_tokens=30, num_layers=2, num_experts=6, top_k=3, seed=9)
    ids[:, 1, 2] = -1
    start = np.stack([np.tile(np.arange(6) < slots, (2, 1)) for slots in (2, 4)])
    both = belady([ids], start)
    for index in range(2):
        assert np.array_equal(both[:, index], belady([ids], start[index : index + 1])[:, 0])
    assert both[0, 0, 1] == exhaustive(ids[:, 1], frozenset(range(2)))


def test_next_uses():
    ids = np.array([[[0, 1]], [[2, -1]], [[1, 0]], [[1, 2]]])
    following, first = next_uses(ids, 4)
    assert following[0, 0].tolist() == [2, 2]
    assert following[1, 0, 0] == 3
    assert following[2, 0].tolist() == [3, NEVER]
    assert following[3, 0].tolist() == [NEVER, NEVER]
    assert first.tolist() == [[0, 0, 1, NEVER]]
