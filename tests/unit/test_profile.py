"""Profiles: what they count, how they are kept, and that they refuse another model."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from routing import make_trace, skewed_ids

from hotset.core.errors import CheckpointError, ConfigError
from hotset.core.fingerprint import ModelFingerprint
from hotset.core.hit_curve import HitCurve
from hotset.core.profile import PolicyReplay, Profile


def trace_of(seed: int = 0, **options):
    ids = skewed_ids(num_tokens=50, num_layers=2, num_experts=8, top_k=2, seed=seed, **options)
    return make_trace([ids[:20], ids[20:]], num_experts=8)


def test_counts_and_reuse_by_hand():
    ids = np.array([[[0, 1]], [[0, 2]], [[3, 1]], [[0, 3]], [[1, 0]]])
    profile = Profile.from_trace(make_trace([ids, ids[:2]], num_experts=4))
    assert profile.counts_LE.tolist() == [[6, 4, 2, 2]]
    assert (profile.num_tokens, profile.num_sequences) == (7, 2)
    # Distances: expert 0: 1, 2, 1 and 1 in the second sequence; 1: 2, 2; 3: 1. Not across the two.
    assert profile.reuse_LB[0, :3].tolist() == [4, 3, 0]
    assert profile.reuse_LB.sum() == 7
    np.testing.assert_allclose(profile.coverage()[0], np.cumsum([6, 4, 2, 2]) / 14)
    share = np.array([6, 4, 2, 2]) / 14
    assert profile.effective_experts()[0] == pytest.approx(np.exp(-(share * np.log(share)).sum()))


def test_far_reuse_goes_into_the_last_bucket_and_even_use_counts_all_experts():
    ids = np.full((70_002, 1, 1), 1)
    ids[0] = ids[-1] = 0
    profile = Profile.from_trace(make_trace([ids], num_experts=2))
    assert profile.reuse_LB[0, -1] == 1
    even = dataclasses.replace(profile, counts_LE=np.array([[5, 5]]))
    assert even.effective_experts() == pytest.approx(2)


@pytest.mark.parametrize("suffix", [".json", ".npz"])
def test_round_trip(tmp_path, suffix):
    replay = PolicyReplay(32.0, (0.0, 0.5, 1.0), (0.0, 0.75, 1.0))
    profile = dataclasses.replace(Profile.from_trace(trace_of()), replay=replay)
    path = tmp_path / f"p{suffix}"
    profile.save(path)
    loaded = Profile.load(path)
    for field in dataclasses.fields(Profile):
        ours, theirs = getattr(profile, field.name), getattr(loaded, field.name)
        assert np.array_equal(ours, theirs) if field.name.isupper() else np.all(ours == theirs)
    assert loaded.counts_LE.dtype == np.int64


def test_a_forecast_goes_into_archives_only(tmp_path):
    profile = Profile.from_trace(trace_of(), with_forecast=True)
    with pytest.raises(ConfigError, match="cannot hold the profile's forecast"):
        profile.save(tmp_path / "p.json")
    profile.save(tmp_path / "p.npz")
    loaded = Profile.load(tmp_path / "p.npz").forecast
    for name, array in profile.forecast.to_arrays().items():
        assert np.array_equal(loaded.to_arrays()[name], array), name
        assert loaded.to_arrays()[name].dtype == array.dtype
    assert profile.merge([profile]).forecast is None
    with np.load(tmp_path / "p.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    np.savez(tmp_path / "p.npz", **{**arrays, "forecast_own_L": np.zeros(9)})
    with pytest.raises(CheckpointError, match="damaged forecast: `own_L`"):
        Profile.load(tmp_path / "p.npz")
    del arrays["forecast_use_L"]
    np.savez(tmp_path / "p.npz", **arrays)
    with pytest.raises(CheckpointError, match="incomplete forecast: no 'use_L'"):
        Profile.load(tmp_path / "p.npz")


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "p.json"
    Profile.from_trace(trace_of()).save(path)
    good = json.loads(path.read_text())
    changes = {
        "version 9": {"version": 9},
        "not a readable profile": {"counts": "x"},
        r"has counts \(1, 8\)": {"counts": good["counts"][:1]},
        "negative counts": {"num_tokens": -1},
        "no valid model fingerprint": {"fingerprint": {}},
        "impossible model fingerprint": {"fingerprint": good["fingerprint"] | {"top_k": [2]}},
    }
    for text, change in changes.items():
        path.write_text(json.dumps(good | change))
        with pytest.raises(CheckpointError, match=text):
            Profile.load(path)
    rows = {"shares": [0.0, 1.0], "hit_rates": [0.0, 1.0]}
    for replay in ({}, {"half_life": 0, **rows}, {"half_life": 4, **rows, "hit_rates": [2.0, 1.0]}):
        path.write_text(json.dumps(good | {"replay": replay}))
        with pytest.raises(CheckpointError, match="not a readable profile"):
            Profile.load(path)
    for content in ("[]", "{", "{}"):
        path.write_text(content)
        with pytest.raises(CheckpointError, match="not a readable profile"):
            Profile.load(path)
    archive = tmp_path / "p.npz"
    Profile.from_trace(trace_of()).save(archive)
    archive.write_bytes(archive.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a readable profile"):
        Profile.load(archive)
    with pytest.raises(CheckpointError, match=r"absent.npz` cannot be read: No such file"):
        Profile.load(tmp_path / "absent.npz")
    with pytest.raises(ConfigError, match=r"kept as \.json or \.npz, not `\.txt`"):
        Profile.load(tmp_path / "p.txt")


def test_another_model_is_refused_with_every_reason():
    profile = Profile.from_trace(trace_of())
    own = profile.fingerprint
    profile.check_fits(own)
    profile.check_fits(dataclasses.replace(own, router_hash=""))  # Not known: not compared.
    other = ModelFingerprint(
        architecture="gpt_oss", num_experts=(32, 32, 16), top_k=(4, 4, 4), router_hash="cd34"
    )
    with pytest.raises(ConfigError) as raised:
        profile.check_fits(other, name="profile `x`")
    assert raised.value.message == (
        "profile `x` is of another model: architecture gpt_oss against made_up, "
        "MoE layers 3 against 2, experts per layer [32, 32, 16] against 8, top-k 4 against 2, "
        "router weights cd34 against ab12"
    )
    retrained = dataclasses.replace(own, router_hash="ffff")
    with pytest.raises(ConfigError, match="router weights ffff against ab12"):
        profile.check_fits(retrained)
    with pytest.raises(ConfigError):
        profile.merge([dataclasses.replace(profile, fingerprint=retrained)])


def test_merge_is_the_profile_of_both():
    first, second = trace_of(0), trace_of(1)
    replayed = HitCurve.from_trace(first, half_lives=(4.0,)).replayed()
    known = dataclasses.replace(Profile.from_trace(first), replay=replayed)
    merged = known.merge([Profile.from_trace(second)])
    assert known.replay is not None and merged.replay is None
    both = Profile.from_trace(make_trace([*first, *second], num_experts=8))
    assert np.array_equal(merged.counts_LE, both.counts_LE)
    assert np.array_equal(merged.reuse_LB, both.reuse_LB)
    assert (merged.num_tokens, merged.num_sequences) == (both.num_tokens, both.num_sequences)


def test_score_and_diff():
    first, second = trace_of(0), trace_of(1)
    profiles = [Profile.from_trace(trace) for trace in (first, second)]
    own, other = (profiles[0].score(trace, slots=0.25) for trace in (first, second))
    assert own == profiles[0].expected_hit_rate(0.25) > other
    hot = np.argsort(-profiles[0].counts_LE, axis=1, kind="stable")[:, :2]
    by_hand = np.take_along_axis(profiles[1].counts_LE, hot, axis=1).sum() / 200
    assert other == by_hand
    diff = profiles[0].diff(profiles[1], slots=0.25)
    assert diff.cross_coverage == other
    assert diff.own_coverage == profiles[1].expected_hit_rate(0.25)
    same = profiles[0].diff(profiles[0])
    assert not same.total_variation_L.any()
    assert (same.shared_hot_L == 1).all()
    assert (diff.total_variation_L > 0).all() and (diff.total_variation_L <= 1).all()
