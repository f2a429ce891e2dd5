"""Drift: what a profile's hot set hits on live routing, against its promise and against chance."""

from __future__ import annotations

import numpy as np
import pytest
from routing import make_trace, skewed_ids

from hotset.core.drift import LEAST_TOKENS, WINDOW_TOKENS, Drift
from hotset.core.profile import Profile

EXPERTS, LAYERS, TOP_K, SLOTS = 16, 2, 2, 4
OWNER = (("one", 1),)


def routed(seed: int, num_tokens: int = 600) -> np.ndarray:
    """[T, L, K]; the first half alone, within which popularity does not change."""
    ids = skewed_ids(
        num_tokens=2 * num_tokens, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, seed=seed
    )
    return ids[:num_tokens]


def profile_of(ids: np.ndarray) -> Profile:
    return Profile.from_trace(make_trace([ids], num_experts=EXPERTS))


def watch(profile: Profile, ids_TLK: np.ndarray) -> Drift:
    drift = Drift(profile, np.full(LAYERS, SLOTS))
    for ids_LK in ids_TLK:
        padded = np.pad(ids_LK, ((0, 0), (0, 3)), constant_values=-1)
        drift.step(padded, OWNER)
    return drift


def test_its_own_text_gives_what_it_promises() -> None:
    ids = routed(1)
    profile = profile_of(ids)
    report = watch(profile, ids).report()
    assert report.seen == pytest.approx(report.expected, abs=1e-12)
    assert report.expected == pytest.approx(profile.expected_hit_rate(SLOTS / EXPERTS), abs=1e-12)
    assert report.blind == SLOTS / EXPERTS
    assert report.num_tokens == len(ids)


def test_other_text_gives_what_a_replay_of_it_gives() -> None:
    profile, other = profile_of(routed(1)), routed(2)
    trace = make_trace([other], num_experts=EXPERTS)
    report = watch(profile, other).report()
    assert report.seen == pytest.approx(profile.score(trace, slots=SLOTS / EXPERTS), abs=1e-12)
    assert report.seen < report.expected  # the control


def test_worse_than_none_is_said_once_and_not_too_early(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = routed(1)
    profile = profile_of(ids)
    rare = np.argsort(profile.counts_LE, axis=1)[:, :TOP_K]  # what the profile's text hardly uses
    drift = Drift(profile, np.full(LAYERS, SLOTS))
    for _ in range(LEAST_TOKENS - 1):
        drift.step(rare, OWNER)
    assert not drift.report().is_worse_than_none and not caplog.messages
    for _ in range(20):
        drift.step(rare, OWNER)
    assert drift.report().is_worse_than_none and drift.report().seen == 0
    (said,) = caplog.messages
    assert said.startswith("the profile is worse than none on this text: its hot set hits 0.000")


def test_what_comes_after_an_answer_does_not_count() -> None:
    drift = Drift(profile_of(routed(1)), np.full(LAYERS, SLOTS))
    drift.step(routed(2)[0], ())
    assert drift.report().num_tokens == 0 and drift.report().seen == 0


def test_old_text_fades() -> None:
    ids = routed(1)
    profile = profile_of(ids)
    rare = np.argsort(profile.counts_LE, axis=1)[:, :TOP_K]
    drift = Drift(profile, np.full(LAYERS, SLOTS))
    block = np.tile(rare, (1, 1024))
    for _ in range(WINDOW_TOKENS // 1024):
        drift.step(block, (("one", 1024),))
    hot = np.argsort(-profile.counts_LE, axis=1)[:, :TOP_K]
    for _ in range(3 * WINDOW_TOKENS // 1024):
        drift.step(np.tile(hot, (1, 1024)), (("one", 1024),))
    # Of equal weight the old text would be a quarter; it was halved at least twice.
    assert drift.report().seen > 0.85
