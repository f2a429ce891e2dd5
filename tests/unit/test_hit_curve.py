"""Hit curves: replayed, counted and assumed ones, and batches made of sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_fakes import t1

from hotset.core.errors import ConfigError
from hotset.core.fingerprint import ModelFingerprint
from hotset.core.hit_curve import (
    HitCurve,
    assumed_curve,
    beside_each_other,
    shortened,
)
from hotset.core.profile import Profile
from hotset.core.simulator import Condition, simulate
from hotset.core.trace import Trace, TraceInfo, TraceSequence, load_trace


def small_trace(lengths: tuple[int, ...] = (5, 3, 4)) -> Trace:
    """Two layers of 8 experts, top-2, ids that differ within a token."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((sum(lengths), 2, 8)), axis=2)[:, :, :2].astype(np.uint8)
    starts = np.cumsum([0, *lengths[:-1]])
    sequences = tuple(
        TraceSequence(index, int(start), length)
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True))
    )
    fingerprint = ModelFingerprint(architecture="", num_experts=(8, 8), top_k=(2, 2))
    return Trace(TraceInfo(fingerprint), ids, sequences)


def test_a_curve_is_a_line_between_its_points() -> None:
    curve = HitCurve((0.0, 0.5, 1.0), (0.0, 0.8, 1.0), "by hand")
    assert [curve.at(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx(
        [0.0, 0.4, 0.8, 0.9, 1.0]
    )


def test_a_replayed_curve_is_what_the_simulator_says() -> None:
    trace = shortened(load_trace("pocket"), 1024)
    curve = HitCurve.from_trace(trace, half_lives=(16.0,))
    (result,) = simulate(trace, [Condition("half-life", 0.25, 16.0)], wish_lag=1)
    assert curve.at(0.25) == result.hit_rate
    assert (curve.at(0), curve.at(1)) == (0, 1)
    assert list(curve.hit_rates) == sorted(curve.hit_rates)
    assert curve.used(t1().layers[0]) == pytest.approx(16 * 4 / 32)  # top-4 of pocket's 32
    assert not curve.assumed
    assert curve.half_life == 16


def test_the_half_life_with_the_most_hits_is_taken() -> None:
    trace = shortened(load_trace("pocket"), 1024)
    each = [HitCurve.from_trace(trace, half_lives=(h,)) for h in (0.1, 32.0)]
    best = HitCurve.from_trace(trace, half_lives=(0.1, 32.0))
    assert best.half_life == 32
    assert sum(best.hit_rates) == max(sum(curve.hit_rates) for curve in each)


def test_rows_of_a_batch_are_sequences_in_turn() -> None:
    trace = small_trace()
    batch = beside_each_other(trace, 2)
    (ids,) = batch
    assert ids.shape == (3, 2, 4)  # row 0 has 5 + 4 tokens, row 1 has 3
    for token in range(3):
        for layer in range(2):
            wanted = {*trace.ids_TLK[token, layer], *trace.ids_TLK[5 + token, layer]}
            found = ids[token, layer]
            assert set(found[found >= 0]) == wanted
            assert (found >= 0).sum() == len(wanted)  # each once


def test_a_batch_has_fewer_hits_than_a_row() -> None:
    trace = load_trace("pocket")
    trace = shortened(trace, 6 * 1024)
    one, four = (HitCurve.from_trace(trace, num_rows=n, half_lives=(16.0,)) for n in (1, 4))
    assert four.at(0.25) < one.at(0.25)
    layer = t1().layers[0]
    assert one.used(layer) < four.used(layer) < 4 * one.used(layer)


def test_more_rows_than_sequences_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 3 sequences, 4 rows need one each"):
        HitCurve.from_trace(small_trace(), num_rows=4)


def test_shortening_keeps_whole_sequences() -> None:
    trace = small_trace((4,) * 8)
    assert shortened(trace, 100) is not None
    assert shortened(trace, 100).sequences == trace.sequences
    assert [s.index for s in shortened(trace, 16).sequences] == [0, 2, 4, 6]


def test_a_profile_covers_what_it_counted() -> None:
    profile = Profile.from_trace(load_trace("pocket"))
    curve = HitCurve.from_profile(profile)
    assert curve.at(0.25) == pytest.approx(profile.coverage()[:, 7].mean())  # 8 of 32 experts
    assert "follows the text has more" in curve.source
    assert curve.half_life is None


def test_a_profile_that_was_replayed_has_that_curve() -> None:
    trace = small_trace((40, 40))
    replayed = HitCurve.from_trace(trace, half_lives=(4.0, 16.0))
    profile = replace(Profile.from_trace(trace), replay=replayed.replayed())
    curve = HitCurve.from_profile(profile)
    assert (curve.shares, curve.hit_rates) == (replayed.shares, replayed.hit_rates)
    assert curve.half_life == replayed.half_life and "`--profile` takes it" in curve.half_life_note
    # It is of one row: several have what the counts say.
    assert HitCurve.from_profile(profile, num_rows=2).half_life is None


def test_rows_of_a_profile_use_what_independent_draws_would() -> None:
    """One layer of 4 experts, top-1, used 4, 2, 1 and 1 times of 8."""
    ids = np.array([0, 0, 0, 0, 1, 1, 2, 3], dtype=np.uint8)[:, None, None]
    info = TraceInfo(ModelFingerprint(architecture="m", num_experts=(4,), top_k=(1,)))
    profile = Profile.from_trace(Trace(info, ids, (TraceSequence(0, 0, 8),)))
    curve = HitCurve.from_profile(profile, num_rows=2)
    used = [1 - (1 - p) ** 2 for p in (1 / 2, 1 / 4, 1 / 8, 1 / 8)]
    assert curve.num_rows == 2
    assert curve.used_share == pytest.approx(sum(used) / 4)
    assert curve.at(0.25) == pytest.approx(used[0] / sum(used))
    assert curve.at(0.25) < HitCurve.from_profile(profile).at(0.25) == 0.5


def test_assumed_curves_rise_with_slots_and_fall_with_rows() -> None:
    curves = [assumed_curve(rows) for rows in (1, 2, 3, 8, 16, 64)]
    for curve in curves:
        assert curve.assumed
        assert list(curve.hit_rates) == sorted(curve.hit_rates)
        assert (curve.at(0), curve.at(1)) == (0, 1)
    at_half = [curve.at(0.5) for curve in curves]
    assert at_half[:-1] == sorted(at_half[:-1], reverse=True)
    assert at_half[-1] == at_half[-2]  # nothing is known beyond 16 rows
    assert curves[2].used(t1().layers[0]) == pytest.approx(16 * (1 - 0.75**3))


def test_the_assumed_curve_lies_within_the_recordings(shared: Path) -> None:
    """The mean of three takes a minute to replay; a thousand tokens of two of them are on either
    side of it at a quarter of the slots, within the noise of so few (0.03 on pocket's halves)."""
    rates = []
    for name, domains in (("gpt-oss-20b", ()), ("moe-54m", ("code_python",))):
        trace = load_trace(shared / f"traces/{name}.npz").select(domains=domains)
        (result,) = simulate(shortened(trace, 1000), [Condition("half-life", 0.25, 16.0)])
        rates.append(result.hit_rate)
    assert rates[0] - 0.03 < assumed_curve().at(0.25) < rates[1] + 0.03
    assert not rates[0] - 0.03 < assumed_curve().at(0.125) < rates[1] + 0.03  # the control
