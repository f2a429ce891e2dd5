"""`hotset profile show|diff|merge|score` on files, from flags to tables and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from routing import make_trace, skewed_ids
from typer.testing import CliRunner

from hotset.cli.profile import app
from hotset.core.errors import HotsetError
from hotset.core.hit_curve import HitCurve
from hotset.core.profile import Profile
from hotset.core.trace import Trace
from hotset.core.trace_file import TraceWriter

EXPERTS, TOP_K = 16, 2


def make(seed: int, *, skew: float = 0.3) -> Trace:
    ids = [
        skewed_ids(
            num_tokens=80, num_layers=2, num_experts=EXPERTS, top_k=TOP_K, seed=seed, skew=skew
        )
        for _ in range(2)
    ]
    return make_trace(ids, num_experts=EXPERTS, domains=["a", "b"])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Profiles `one.json` and `two.npz` of one model, `other.json` of another; `two.trace`."""
    for name, seed in (("one.json", 1), ("two.npz", 2)):
        Profile.from_trace(make(seed)).save(tmp_path / name)
    other = Profile.from_trace(make(3))
    changed = replace(other.fingerprint, router_hash="cd34")
    replace(other, fingerprint=changed).save(tmp_path / "other.json")
    trace = make(2)
    with TraceWriter(tmp_path / "two.trace", trace.info) as writer:
        for ids, sequence in zip(trace, trace.sequences, strict=True):
            writer.append(writer.open_sequence(sequence.domain), ids)
    return tmp_path


def run(*args: object) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def answer(*args: object) -> Any:
    return json.loads(run(*args, "--json").stdout)


def test_show_says_what_the_hot_set_covers(files: Path) -> None:
    profile = Profile.load(files / "one.json")
    out = answer("show", files / "one.json", "--slots", "0.25,1")
    quarter, whole = out["rows"]
    assert quarter["coverage"] == profile.expected_hit_rate(0.25) < 1
    # By hand: the four most used of sixteen experts.
    best = np.sort(profile.counts_LE, axis=1)[:, -4:].sum(axis=1) / profile.counts_LE.sum(axis=1)
    assert quarter["coverage_of_layers"] == pytest.approx(best.tolist(), abs=1e-12)
    assert whole["coverage_of_layers"] == [1.0, 1.0]
    assert out["tokens"] == 160 and out["forecast"] is False and out["replay"] is None
    table = run("show", files / "one.json").stdout
    assert "router hash ab12" in table and f"{out['effective_experts'][0]:.1f}" in table


def test_show_says_what_a_replay_hits(files: Path) -> None:
    curve = HitCurve((0.0, 0.5, 1.0), (0.0, 0.8, 1.0), "made up", half_life=8.0)
    profile = replace(Profile.load(files / "one.json"), replay=curve.replayed())
    profile.save(files / "replayed.json")
    said = run("show", files / "replayed.json", "--slots", "0.25").stdout
    assert "followed with half-life 8, its text has hits of 0.400 in 0.25" in said
    assert answer("show", files / "replayed.json")["replay"]["half_life"] == 8.0


def test_show_draws(files: Path) -> None:
    run("show", files / "two.npz", "--plot", files / "curve.svg")
    assert (files / "curve.svg").read_text().startswith("<?xml")


def test_diff_of_a_profile_with_itself_is_nothing(files: Path) -> None:
    same = answer("diff", files / "one.json", files / "one.json", "--slots", "0.25")
    assert same["total_variation_of_layers"] == [0, 0]
    assert same["rows"][0]["shared_hot"] == 1
    other = answer("diff", files / "one.json", files / "two.npz", "--slots", "0.25")["rows"][0]
    assert other["shared_hot"] < 1 and other["cross_coverage"] < other["own_coverage"]
    assert "uses differ by 0.000" in run("diff", files / "one.json", files / "one.json").stdout


def test_merge_adds_counts(files: Path) -> None:
    run("merge", files / "one.json", files / "two.npz", "-o", files / "both")
    one, two = Profile.load(files / "one.json"), Profile.load(files / "two.npz")
    merged = Profile.load(files / "both.npz")
    assert np.array_equal(merged.counts_LE, one.counts_LE + two.counts_LE)
    assert merged.num_sequences == 4


def test_score_stands_beside_promise_and_chance(files: Path) -> None:
    own = answer("score", files / "two.npz", files / "two.trace", "--slots", "0.25")["rows"][0]
    assert own["uniform"] == own["own"] and not own["worse_than_none"]
    held_out = answer("score", files / "one.json", files / "two.trace", "--slots", "0.25")
    assert held_out["rows"][0]["uniform"] < held_out["rows"][0]["own"]
    part = answer("score", files / "one.json", files / "two.trace", "--domain", "b")
    assert (held_out["tokens"], part["tokens"]) == (160, 80)


def test_a_profile_that_is_worse_than_none_is_called_that(files: Path) -> None:
    """A profile whose hot set is what the text uses least."""
    profile = Profile.load(files / "two.npz")
    upside_down = profile.counts_LE.max() - profile.counts_LE
    replace(profile, counts_LE=upside_down).save(files / "wrong.json")
    wrong = answer("score", files / "wrong.json", files / "two.trace", "--slots", "0.25")
    assert wrong["rows"][0]["worse_than_none"]
    said = run("score", files / "wrong.json", files / "two.trace", "--slots", "0.25").stdout
    assert "worse than none" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("diff", "one.json", "other.json"), "other.json` is of another model: router weights"),
        (("merge", "one.json", "other.json", "-o", "x"), "other.json` is of another model"),
        (("score", "other.json", "two.trace"), "other.json` is of another model"),
        (("merge", "one.json", "-o", "x"), "one profile is nothing to merge"),
        (("merge", "one.json", "two.npz", "-o", "x.txt"), "`--output` is"),
        (("merge", "one.json", "two.npz", "-o", "none/x"), "there is no folder"),
        (("merge", "one.json", "two.npz", "-o", ""), "`--output` is no name of a file"),
        (("show", "one.json", "--slots", "x"), "`--slots` is `x`"),
        (("show", "one.json", "--slots", "1.5"), "`--slots` has a share of 1.5"),
        (("show", "two.trace"), "a profile is kept as"),
        (("score", "one.json", "two.trace", "--domain", "c"), "no domain `c`"),
    ],
)
def test_what_is_refused(files: Path, args: tuple[str, ...], message: str) -> None:
    paths = [str(files / arg) if "." in arg or "/" in arg or arg == "x" else arg for arg in args]
    given = [arg if paths[i - 1] == "--slots" else path for i, (arg, path) in
             enumerate(zip(args, paths, strict=True))]  # fmt: skip
    with pytest.raises(HotsetError) as caught:
        run(*given)
    assert message in caught.value.message
