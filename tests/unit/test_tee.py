"""Which staged records take whose slots, and that those of a group are copied at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from records import layers, make_store, record_bytes, resident

from hotset.experts.ring import Staged
from hotset.experts.store import ExpertStore
from hotset.runtime.tee import Swaps, Tee

NUM_EXPERTS = 12
Pairs = list[tuple[int, int]]
# Staged experts, ascending, and the first expert that has not run by then.
Groups = list[tuple[list[int], int]]


class Told:
    """A store that only notes what it is told."""

    def __init__(self) -> None:
        self.teed: list[Pairs] = []
        self.handed: Pairs = []

    def tee(self, staged: Staged, pairs: Pairs) -> None:
        self.teed.append(list(pairs))

    def hand_over(self, layer: int, pairs: Pairs) -> None:
        self.handed = list(pairs)


def taken(used_E: np.ndarray, wanted: list[int], victims: list[int], groups: Groups) -> list[Pairs]:
    """(expert, victim) of each group, which are all handed over at the end."""
    store: Any = Told()
    swaps = Swaps(store, 0, used_E, wanted, victims)
    for staged, stop in groups:
        swaps.take(Staged(0, tuple(staged), 0, 128, 0), stop=stop)
    swaps.finish()
    assert store.handed == [pair for pairs in store.teed for pair in pairs]
    return store.teed


def one_by_one(
    used_E: np.ndarray, wanted: list[int], victims: list[int], groups: Groups
) -> list[Pairs]:
    """The rule, an expert at a time: each takes the first victim left that nobody still reads."""
    left, found = list(victims), []
    for staged, stop in groups:
        pairs = []
        for expert in wanted:
            free = [v for v in left if v < stop or not used_E[v]]
            if expert in staged and free:
                left.remove(free[0])
                pairs.append((expert, free[0]))
        found.append(pairs)
    return found


def test_a_victim_that_is_still_read_keeps_its_slot_for_now() -> None:
    used_E = np.ones(NUM_EXPERTS, dtype=np.bool_)
    used_E[9] = False
    groups = [([2, 4, 5], 6), ([7, 10], 12)]
    got = taken(used_E, [10, 5, 2, 4], [8, 9, 1], groups)
    assert got == [[(5, 9), (2, 1)], [(10, 8)]], "8 runs in the second group; 4 finds none left"


@pytest.mark.parametrize("seed", range(30))
def test_a_group_takes_what_its_experts_would_take_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids, num = rng.permutation(NUM_EXPERTS).tolist(), int(rng.integers(1, 7))
    wanted, victims, cut = ids[:num], ids[num : 2 * num], int(rng.integers(0, NUM_EXPERTS))
    used_E = rng.random(NUM_EXPERTS) < 0.6
    staged = sorted({*ids} - {*victims})
    parts = [[e for e in staged if e < cut], [e for e in staged if e >= cut]]
    groups = [(part, part[-1] + 1) for part in parts if part]
    want = one_by_one(used_E, list(wanted), list(victims), groups)
    assert taken(used_E, wanted, victims, groups) == want


def prompted(num_missing: int, monkeypatch: pytest.MonkeyPatch) -> tuple[ExpertStore, list[int]]:
    """A layer whose residents 0, 1 and 2 score less than so many others, all of one group; and how
    many records each launch copied."""
    store, launches = make_store(layers(NUM_EXPERTS), 3, staging_records=18), []
    store.place(resident(store, {0: [0, 1, 2]}))
    copy = store.ring.copy_to_slots

    def watched(staged: Staged, experts: list[int], *rest: Any) -> None:
        launches.append(len(experts))
        copy(staged, experts, *rest)

    monkeypatch.setattr(store.ring, "copy_to_slots", watched)
    score_E = np.where(np.arange(NUM_EXPERTS) < 3, 1.0, 0.0)
    missing = list(range(4, 4 + num_missing))
    score_E[missing] = np.arange(2.0, 2.0 + num_missing)
    policy: Any = SimpleNamespace(scores=lambda layer: score_E)
    used_E = np.ones(NUM_EXPERTS, dtype=np.bool_)
    swaps = Tee(policy, store).swaps(0, used_E)
    staged = store.ring.stage(
        0, list(range(3, 12)), record_bytes=store.layers[0].expert.record_bytes
    )
    swaps.take(staged, stop=NUM_EXPERTS)
    store.ring.release(staged)
    swaps.finish()
    return store, launches


@pytest.mark.parametrize(
    ("num_missing", "owners"), [(0, [0, 1, 2]), (1, [1, 2, 4]), (2, [2, 4, 5]), (5, [6, 7, 8])]
)
def test_what_outranks_residents_has_their_slots(
    num_missing: int, owners: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, launches = prompted(num_missing, monkeypatch)
    assert store.placement.residents(0).tolist() == owners
    for expert in owners:
        slot = int(store.placement.slot_of[0, expert])
        assert torch.equal(store.slots.view(slot), record_bytes(store, 0, expert))
    assert store.audit() == [] and not store.is_torn
    assert launches == [min(num_missing, 3)] * (num_missing > 0)
