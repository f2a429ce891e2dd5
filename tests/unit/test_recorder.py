"""Recording what steps route: order, interleaved sequences, bounds, and a disk that fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotset.core.errors import ConfigError
from hotset.core.fingerprint import ModelFingerprint
from hotset.core.trace import Trace, TraceInfo, load_trace
from hotset.runtime.recorder import RoutingRecorder, tokens_of

TOP_K = (2, 3)
INFO = TraceInfo(
    ModelFingerprint(architecture="made_up", num_experts=(8, 8), top_k=TOP_K, router_hash="ab")
)


def routed(tokens: np.ndarray) -> np.ndarray:
    """A step's ids by layer, [L, N], of those by token, [T, L, K]; layers padded at their end."""
    ids_LN = np.full((len(TOP_K), len(tokens) * max(TOP_K) + 1), -1, dtype=np.int32)
    for layer, k in enumerate(TOP_K):
        ids_LN[layer, : len(tokens) * k] = tokens[:, layer, :k].reshape(-1)
    return ids_LN


def some_tokens(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    ids = np.stack([[random.permutation(8)[: max(TOP_K)] for _ in TOP_K] for _ in range(count)])
    ids[:, 0, TOP_K[0] :] = -1
    return ids


def recorded(path: Path) -> Trace:
    return load_trace(path)


def test_ids_by_layer_become_ids_by_token() -> None:
    tokens = some_tokens(5, seed=0)
    assert np.array_equal(tokens_of(routed(tokens), TOP_K, 5), tokens)
    # The control: another order of tokens is another trace.
    assert not np.array_equal(tokens_of(routed(tokens[::-1]), TOP_K, 5), tokens)


def test_sequences_of_one_step_are_kept_apart(tmp_path: Path) -> None:
    first, second = some_tokens(6, seed=1), some_tokens(9, seed=2)
    with RoutingRecorder(tmp_path / "a.trace", INFO) as recorder:
        recorder.domain = "de"
        recorder.step(routed(first[:4]), [("one", 4)])
        recorder.domain = "en"
        recorder.step(routed(np.concatenate([first[4:5], second[:8]])), [("one", 1), ("two", 8)])
        recorder.step(routed(some_tokens(3, seed=3)), [])  # of no sequence
        recorder.step(routed(np.concatenate([second[8:], first[5:]])), [("two", 1), ("one", 1)])
        recorder.end("one")
        recorder.end("never ran")
        assert (recorder.num_tokens, recorder.num_sequences) == (15, 2)
    trace = recorded(tmp_path / "a.trace")
    assert trace.domains == ("de", "en")
    for ids_TLK, want in zip(trace, (first, second), strict=True):
        assert np.array_equal(ids_TLK, want)
    assert trace.token_ids_T is None


def test_an_owner_that_comes_back_begins_a_new_sequence(tmp_path: Path) -> None:
    tokens = some_tokens(4, seed=4)
    with RoutingRecorder(tmp_path / "a.trace", INFO) as recorder:
        for part in (tokens[:3], tokens[3:]):
            recorder.step(routed(part), [("one", len(part))])
            recorder.end("one")
    assert [s.num_tokens for s in recorded(tmp_path / "a.trace").sequences] == [3, 1]


def test_a_full_file_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, bound = tmp_path / "a.trace", 1500
    with RoutingRecorder(path, INFO, max_bytes=bound) as recorder:
        for step in range(40):
            recorder.step(routed(some_tokens(64, seed=step)), [("one", 64)])
        assert recorder.stopped
        recorder.end("one")
    assert path.stat().st_size <= bound
    assert 0 < recorded(path).num_tokens < 40 * 64
    (said,) = caplog.messages
    assert "stops: it has reached 1.46 KiB" in said


def test_a_disk_that_takes_no_more_ends_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    with RoutingRecorder(full, INFO) as recorder:
        for step in range(4):
            recorder.step(routed(some_tokens(256, seed=step)), [("one", 256)])
    assert recorder.stopped
    assert ["No space left on device" in said for said in caplog.messages] == [True]


def test_a_file_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        RoutingRecorder(tmp_path / "none" / "a.trace", INFO)
