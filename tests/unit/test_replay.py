"""Routing replayed for a random model: streams, rows and profiles against the trace itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from routing import make_trace, skewed_ids

from hotset.bench.replay import ReplayedRouting, map_profile, map_trace, never_again
from hotset.bench.shapes import shape_config
from hotset.core.errors import ConfigError
from hotset.core.geometry import ModelGeometry
from hotset.core.trace import Trace
from hotset.models.geometry import build_meta

TOKENS = 12


@pytest.fixture(scope="module")
def geometry() -> ModelGeometry:
    """3 layers of 8 experts, top-2."""
    return build_meta(shape_config("tiny", num_layers=3)).geometry


@pytest.fixture(scope="module")
def trace() -> Trace:
    """5 texts of 2 layers, 4 experts, top-1; the last is too short for a row of its own."""
    lengths = (TOKENS, TOKENS, TOKENS + 2, TOKENS, 3)
    ids = [
        skewed_ids(num_tokens=n, num_layers=2, num_experts=4, top_k=1, seed=seed)
        for seed, n in enumerate(lengths)
    ]
    return make_trace(ids, num_experts=4)


def test_streams_are_other_texts_on_disjoint_ids(trace: Trace, geometry: ModelGeometry) -> None:
    replay = map_trace(trace, geometry, num_tokens=TOKENS, num_rows=2)
    assert replay.ids_TBLK.shape == (TOKENS, 2, 3, 2)
    texts = [ids[:TOKENS, :, 0] for ids in trace][:4]
    for row in range(2):
        for layer, group in ((0, 0), (1, 0), (2, 1)):  # layer 2 is layer 0 of further texts
            for stream in range(2):
                text = texts[(row + 2 * group + stream) % 4]
                got = replay.ids_TBLK[:, row, layer, stream]
                assert np.array_equal(got, text[:, layer % 2] + 4 * stream)
    assert replay.distortion == ""
    assert np.array_equal(replay.first_rows(1).ids_TBLK, replay.ids_TBLK[:, :1])


def test_more_rows_than_texts(trace: Trace, geometry: ModelGeometry) -> None:
    map_trace(trace, geometry, num_tokens=TOKENS, num_rows=4)
    with pytest.raises(ConfigError, match="4 texts of 12 tokens for 5 rows"):
        map_trace(trace, geometry, num_tokens=TOKENS, num_rows=5)


def test_experts_that_are_never_used_are_named(trace: Trace) -> None:
    config = shape_config("tiny", num_layers=2)
    config.num_experts = 16
    replay = map_trace(trace, build_meta(config).geometry, num_tokens=TOKENS)
    assert replay.distortion == "8 of 16 experts never used" and replay.distortion in replay.note
    assert replay.ids_TBLK.max() == 7


def test_a_profile_is_of_all_texts(trace: Trace, geometry: ModelGeometry) -> None:
    prior_LE = map_profile(trace, geometry)
    uses_LE = np.zeros((2, 4))
    for ids_TLK in trace:
        for layer in range(2):
            for expert in ids_TLK[:, layer, 0]:
                uses_LE[layer, expert] += 1 / trace.num_tokens
    for layer in range(3):
        assert prior_LE[layer] == pytest.approx(np.tile(uses_LE[layer % 2], 2))


def test_nothing_comes_back_early(geometry: ModelGeometry) -> None:
    ids_TBLK = never_again(geometry, num_tokens=8, num_rows=2).ids_TBLK
    for layer in range(3):
        flat = ids_TBLK[:, :, layer].ravel()
        for start in range(len(flat) - 8):
            assert len(set(flat[start : start + 8])) == 8


def test_steps_on_the_device(geometry: ModelGeometry, trace: Trace) -> None:
    """In order, round at the end, and another replay leaves the first as it was."""
    replay = map_trace(trace, geometry, num_tokens=3, num_rows=2)
    kept = replay.ids_TBLK.copy()
    routing = ReplayedRouting(replay, device=torch.device("cpu"))
    for step in (0, 1, 2, 0, 1):
        routing.advance()
        for layer in range(3):
            assert np.array_equal(routing.ids(layer).numpy(), kept[step, :, layer])
    other = never_again(geometry, num_tokens=3, num_rows=2)
    routing.restart(other)
    routing.advance()
    assert np.array_equal(routing.ids(1).numpy(), other.ids_TBLK[0, :, 1])
    assert np.array_equal(replay.ids_TBLK, kept)
