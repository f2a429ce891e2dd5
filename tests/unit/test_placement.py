"""The mirror keeps its invariants, and `match` is the rule of the specification below."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.core.errors import CapacityError, ConfigError
from hotset.core.placement import Placement
from hotset.core.slot_pools import SlotPools

L, E, V = 3, 7, 4


def rule(slot_of: dict[int, int], ids: list[int], victims: list[int], admit: list[int], num: int):
    """The match rule in words, for one layer. Returns [(expert, victim, slot)]."""
    used = {i for i in ids if 0 <= i < num}
    missing = [e for e in sorted(used) if e not in slot_of and admit[e] > 0]
    free = [(p, v) for p, v in enumerate(victims) if v in slot_of and v not in used]
    pairs = zip(missing, free, strict=False)
    return [(e, v, slot_of[v]) for e, (p, v) in pairs if admit[e] > p]


def placement_of(resident: np.ndarray, *, num_spare: int = 0, extra: int = 0) -> Placement:
    slots = resident.sum(axis=1)
    slots[0] += extra
    pools = SlotPools.uniform([E] * len(resident), slots.tolist())
    return Placement.from_residents(pools, resident, num_spare=num_spare)


@st.composite
def steps(draw):
    """A placement, and wishes and ids that may be stale, contradictory, repeated or padded."""
    resident = np.array(draw(st.lists(st.booleans(), min_size=L * E, max_size=L * E))).reshape(L, E)
    num_ids = draw(st.integers(1, 6))
    ids = draw(st.lists(st.integers(-2, E + 1), min_size=L * num_ids, max_size=L * num_ids))
    victims = []
    for _ in range(L):
        row = draw(st.permutations(range(E)))[:V]
        keep = draw(st.lists(st.booleans(), min_size=V, max_size=V))
        victims.append([v if k else -1 for v, k in zip(row, keep, strict=True)])
    admit = draw(st.lists(st.integers(0, V + 1), min_size=L * E, max_size=L * E))
    shape = (L, num_ids)
    return resident, np.reshape(ids, shape), np.array(victims), np.reshape(admit, (L, E))


@settings(max_examples=300, deadline=None)
@given(steps())
def test_match_is_the_rule(step):
    resident, ids, victims, admit = step
    placement = placement_of(resident)
    want = []
    for layer in range(L):
        slot_of = {e: int(placement.slot_of[layer, e]) for e in range(E) if resident[layer, e]}
        args = ids[layer].tolist(), victims[layer].tolist(), admit[layer].tolist()
        own = rule(slot_of, *args, E)
        assert placement.match(layer, args[0], victims[layer], admit[layer]) == own
        want += [(layer, *match) for match in own]
    found = placement.match_step(ids, victims, admit)
    columns = (found.layer, found.expert, found.victim, found.slot)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == want
    routed = [{i for i in row.tolist() if 0 <= i < E} for row in ids]
    assert found.num_routed == sum(map(len, routed))
    assert found.num_hits == sum(resident[row, i] for row in range(L) for i in routed[row])
    placement.apply(found)
    placement.check()
    after = {(row, e): s for row, e, _, s in want}
    assert all(placement.slot_of[key] == slot for key, slot in after.items())
    assert placement.resident.sum() == resident.sum()


def test_rank_goes_by_free_victims_but_outranking_by_position():
    """Control for the rule: expert 6 needs admit 3, because the free victim stands third."""
    placement = placement_of(np.array([[True] * 4 + [False] * 3]))
    victims = np.array([0, 1, 2, 3])
    for admit_of_6, want in ((2, []), (3, [(6, 2, 2)])):
        admit = np.array([0, 0, 0, 0, 0, 0, admit_of_6])
        assert placement.match(0, [0, 1, 6], victims, admit) == want
    # The first missing expert uses up the first free victim even when it does not outrank it.
    admit = np.array([0, 0, 0, 0, 0, 2, 4])
    assert placement.match(0, [0, 1, 5, 6], victims, admit) == [(6, 3, 3)]


def test_experts_of_the_running_step_are_protected():
    placement = placement_of(np.array([[True] * 4 + [False] * 3]))
    everything = np.full(E, V)
    assert placement.match(0, [0, 1, 2, 3, 6], np.array([0, 1, 2, 3]), everything) == []


def test_no_slots_and_all_slots():
    for resident in (np.zeros((L, E), bool), np.ones((L, E), bool)):
        placement = placement_of(resident)
        ids = np.tile(np.arange(3), (L, 1))
        found = placement.match_step(ids, np.full((L, V), 1), np.full((L, E), V))
        assert len(found) == 0
        assert found.num_hits == (3 * L if resident.any() else 0)
        placement.check()


def test_assign_and_evict_move_capacity_between_layers():
    placement = placement_of(np.array([[True, True] + [False] * 5, [True] + [False] * 6]))
    slot = placement.evict(0, 1)
    assert placement.num_free(1) == 1
    assert placement.owner(slot) is None
    assert placement.assign(1, 5) == slot
    assert placement.owner(slot) == (1, 5)
    assert placement.residents(0).tolist() == [0]
    assert placement.residents(1).tolist() == [0, 5]
    placement.check()
    with pytest.raises(CapacityError, match="all 3 of its size are taken"):
        placement.assign(0, 3)


def test_a_lent_slot_goes_to_a_missing_expert():
    placement = placement_of(np.array([[True] + [False] * 6, [True] * 7]), num_spare=2, extra=1)
    column, slot = placement.lend(0)
    assert column == E
    placement.check()
    # The spare column is a victim like any other, and is never routed: id 7 is padding.
    assert placement.match(0, [column], np.array([column]), np.full(E, V)) == []
    found = placement.match_step(
        np.array([[4], [0]]), np.array([[column, 0], [-1, -1]]), np.full((2, E), V)
    )
    placement.apply(found)
    placement.check()
    assert placement.slot_of[0, 4] == slot
    assert placement.residents(0).tolist() == [0, 4]
    assert not placement.resident[0, column]


def test_pinned_experts_are_not_evicted():
    placement = placement_of(np.array([[True, True] + [False] * 5]))
    placement.pin(0, 1)
    with pytest.raises(AssertionError, match="no host copy"):
        placement.evict(0, 1)
    placement.check()


def test_check_notices_a_lost_slot():
    """Control: the invariants can fail."""
    placement = placement_of(np.array([[True, True] + [False] * 5]))
    placement.slot_of[0, 1] = placement.slot_of[0, 0]
    with pytest.raises(AssertionError):
        placement.check()


def test_pools_by_record_size():
    pools = SlotPools.build(
        num_experts=[4, 8, 4], record_bytes=[256, 128, 256], num_slots={128: 5, 256: 3}
    )
    assert [(p.record_bytes, p.first_slot, p.num_slots) for p in pools.pools] == [
        (128, 0, 5),
        (256, 5, 3),
    ]
    assert pools.pool_of_layer == (1, 0, 1)
    assert pools.split_evenly().tolist() == [2, 5, 1]
    resident = np.zeros((3, 8), bool)
    resident[0, :2] = resident[1, :5] = resident[2, 3] = True
    placement = Placement.from_residents(pools, resident)
    placement.check()
    assert placement.slot_of[2, 3] == 7
    assert placement.num_free(0) == 0
    with pytest.raises(ConfigError, match="2 slots for records of 512 bytes"):
        SlotPools.build(num_experts=[4], record_bytes=[256], num_slots={512: 2})


def test_even_split_gives_no_layer_more_than_it_has():
    pools = SlotPools.build(num_experts=[2, 9, 9], record_bytes=[1] * 3, num_slots={1: 13})
    assert pools.split_evenly().tolist() == [2, 6, 5]
    everything = SlotPools.build(num_experts=[2, 9, 9], record_bytes=[1] * 3, num_slots={1: 99})
    assert everything.split_evenly().tolist() == [2, 9, 9]


def test_layers_of_different_width():
    """Ids and victims beyond a layer's own experts are padding, whatever the widest layer has."""
    pools = SlotPools.uniform([3, 6], [1, 1])
    resident = np.zeros((2, 6), bool)
    resident[:, 0] = True
    placement = Placement.from_residents(pools, resident)
    found = placement.match_step(
        np.array([[4, 2], [4, 2]]), np.array([[0, 5], [0, 5]]), np.full((2, 6), 8)
    )
    assert list(zip(found.layer, found.expert, found.victim, strict=True)) == [(0, 2, 0), (1, 2, 0)]
    assert found.num_routed == 3
