"""Uses and misses of each expert, counted from routed ids and residency at a step's beginning."""

from __future__ import annotations

import numpy as np

from hotset.core.placement import Placement
from hotset.core.slot_pools import SlotPools
from hotset.runtime.heat import Heat


def placed(*residents: tuple[int, int]) -> Placement:
    """Two layers, of 4 and of 3 experts, and 3 slots."""
    pools = SlotPools.build(num_experts=[4, 3], record_bytes=[64, 64], num_slots={64: 3})
    placement = Placement(pools)
    for layer, expert in residents:
        placement.assign(layer, expert)
    return placement


def test_uses_are_counted_by_token_and_padding_is_not() -> None:
    heat = Heat(placed())
    heat.step(np.array([[0, 3, 3, -1], [2, 0, 2, 2]]), ())
    heat.step(np.array([[1], [0]]), ())
    assert heat.use_LE.tolist() == [[1, 1, 0, 2], [2, 0, 3, 0]]
    assert (heat.missed_LE == heat.use_LE).all(), "nobody has a slot"


def test_a_slot_that_is_filled_in_a_step_counts_from_the_next_one() -> None:
    placement = placed((0, 1))
    heat = Heat(placement)
    placement.assign(0, 2)  # what a step that missed expert 2 has done by the time it is told
    heat.step(np.array([[1, 2], [0, 0]]), ())
    heat.step(np.array([[1, 2], [0, 0]]), ())
    assert heat.missed_LE.tolist() == [[0, 0, 1, 0], [4, 0, 0, 0]]
    assert heat.residents().tolist() == [[False, True, True, False], [False] * 4]
