"""The speed of light of decode steps, summed over steps whose hits and lengths are known."""

from __future__ import annotations

import numpy as np
import pytest

from hotset.bench.shapes import shape_config
from hotset.core.costmodel import Rates, decode_step
from hotset.core.geometry import ModelGeometry
from hotset.core.placement import Placement
from hotset.core.slot_pools import SlotPools
from hotset.models.geometry import build_meta
from hotset.runtime.light import StepLight

RATES = Rates(link_gbps=50.0, copy_gbps=55.0, hbm_gbps=4000.0, layer_us=100.0)


@pytest.fixture
def geometry() -> ModelGeometry:
    """2 layers of 8 experts, top-2."""
    return build_meta(shape_config("tiny")).geometry


@pytest.fixture
def placement(geometry: ModelGeometry) -> Placement:
    """Experts 0 and 1 of each layer have slots."""
    record_bytes = geometry.layers[0].expert.record_bytes
    pools = SlotPools.build(
        num_experts=[8, 8], record_bytes=[record_bytes] * 2, num_slots={record_bytes: 4}
    )
    return Placement.from_residents(pools, np.arange(8)[None] < np.array([[2], [2]]))


def light(geometry: ModelGeometry, hits: list[int], misses: list[int], context: int) -> float:
    cost = decode_step(geometry, RATES, hits=hits, misses=misses, context_tokens=context)
    return cost.total_ms / 1e3


def test_steps_add_up_by_their_own_hits_and_lengths(
    geometry: ModelGeometry, placement: Placement
) -> None:
    watch = StepLight(geometry, RATES, placement)
    prompt = np.zeros((2, 10), dtype=np.int32)
    watch.step(prompt, [("one", 5)])
    assert watch.seconds == 0.0, "a prompt is no decode step"
    watch.step(np.array([[0, 4], [5, 6]]), [("one", 1)])
    expected = light(geometry, [1, 0], [1, 2], 6)
    assert watch.seconds == pytest.approx(expected)
    # Two rows: an expert of both is read once, and padding is none.
    watch.step(np.array([[0, 4, 4, -1], [1, 0, 1, -1]]), [("one", 1), ("two", 1), (None, 1)])
    expected += light(geometry, [1, 2], [1, 0], 7 + 1)
    assert watch.seconds == pytest.approx(expected)
    watch.end("one")
    watch.step(np.array([[0, 1], [0, 1]]), [("two", 1)])
    expected += light(geometry, [2, 2], [0, 0], 2)
    assert watch.seconds == pytest.approx(expected)


def test_hits_are_of_the_owners_that_a_step_began_with(
    geometry: ModelGeometry, placement: Placement
) -> None:
    """A fill has taken place by the time a watcher is told: it was a miss all the same."""
    watch = StepLight(geometry, RATES, placement)
    placement.evict(0, 1)
    placement.assign(0, 4)
    watch.step(np.array([[0, 4], [0, 1]]), [("one", 1)])
    first = light(geometry, [1, 2], [1, 0], 1)
    assert watch.seconds == pytest.approx(first)
    watch.step(np.array([[0, 4], [0, 1]]), [("one", 1)])
    assert watch.seconds == pytest.approx(first + light(geometry, [2, 2], [0, 0], 2))
