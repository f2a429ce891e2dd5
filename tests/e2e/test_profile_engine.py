"""An engine with a profile: who gets the slots, what is refused, and that no bit depends on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from families import Pocket, open_pocket
from hotset.core.errors import ConfigError
from hotset.core.profile import Profile
from hotset.core.trace import load_trace
from hotset.runtime.profiling import Excerpt, record_trace

NUM_TOKENS = 5


@pytest.fixture(scope="module")
def pocket() -> Pocket:
    return open_pocket()


@pytest.fixture(scope="module")
def profile_file(pocket: Pocket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    with pocket.engine(context_tokens=96) as engine:
        excerpts = [Excerpt(tuple(pocket.ids[i : i + 64])) for i in range(0, 192, 64)]
        trace = record_trace(engine, excerpts, folder / "trace", name="pocket")
    Profile.from_trace(trace, with_forecast=True).save(folder / "p.npz")
    return folder / "p.npz"


def answer(pocket: Pocket, **options: object) -> tuple[list[int], np.ndarray, object]:
    with pocket.engine(share=0.25, **options) as engine:
        before = engine.store.placement.resident.copy()
        out = engine.generate_ids(pocket.ids[:20], max_tokens=NUM_TOKENS)
        tokens = [token.token_id for token in out]
        return tokens, before, engine.drift and engine.drift.report()


@pytest.mark.parametrize("policy", ["static-uniform", "static-global", "forecast", None])
def test_a_profile_chooses_residents_and_changes_no_token(
    pocket: Pocket, profile_file: Path, policy: str | None
) -> None:
    plain, blind, nothing = answer(pocket)
    tokens, resident, drift = answer(pocket, profile=str(profile_file), policy=policy)
    assert tokens == plain
    assert nothing is None and drift is not None
    profile = Profile.load(profile_file)
    width = profile.counts_LE.shape[1]
    covered = [(profile.counts_LE * r[:, :width]).sum() for r in (resident, blind)]
    assert resident.sum() == blind.sum() and covered[0] > covered[1]
    assert drift.num_tokens == 20 + NUM_TOKENS - 1


def test_another_models_profile_is_refused(
    pocket: Pocket, profile_file: Path, tmp_path: Path
) -> None:
    profile = Profile.load(profile_file)
    of_shape = replace(profile.fingerprint, router_hash="cd" * 32)
    replace(profile, fingerprint=of_shape).save(tmp_path / "same-shape.npz")
    other = replace(profile.fingerprint, architecture="mixtral")
    replace(profile, fingerprint=other).save(tmp_path / "other.npz")
    with pytest.raises(ConfigError, match=r"same-shape.npz` is of another model: router weights"):
        answer(pocket, profile=str(tmp_path / "same-shape.npz"))
    with pytest.raises(ConfigError, match=r"other.npz` is of another model: architecture"):
        answer(pocket, profile=str(tmp_path / "other.npz"))


def test_static_policies_need_one(pocket: Pocket) -> None:
    with pytest.raises(ConfigError, match="needs"):
        answer(pocket, policy="static-uniform")


def test_generate_records_and_takes_a_profile(
    run: Callable, pocket: Pocket, profile_file: Path, tmp_path: Path
) -> None:
    args = ("generate", "pocket", "Once upon a time", "--device", "cpu", "--max-tokens", 4)
    with_profile = ("--vram", "1GiB", "--context", 64, "--profile", profile_file)
    done = run(*args, *with_profile, "--record", tmp_path / "t.trace", "--json")
    assert done.code == 0, done.err
    stats = json.loads(done.out)["stats"]
    trace = load_trace(tmp_path / "t.trace")
    assert trace.num_tokens == stats["num_prompt_tokens"] + stats["num_tokens"] - 1
    assert trace.token_ids_T is None
    assert "profile: its hot set hits" in done.err
