"""Traces: our file round-trips, is bounded, and every damage is named; numpy archives are read."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import pytest
from routing import make_trace, skewed_ids

from hotset.core.errors import CheckpointError, ConfigError
from hotset.core.fingerprint import ModelFingerprint
from hotset.core.trace import TraceInfo, load_trace
from hotset.core.trace_file import FRAME_TOKENS, TraceWriter, read_trace

INFO = TraceInfo(
    ModelFingerprint(architecture="a", num_experts=(9, 300), top_k=(2, 3), router_hash="f0"),
    model="m",
    source="s",
    license="Apache-2.0",
)


def ids_of(num_tokens: int, seed: int) -> np.ndarray:
    """[T, 2, 3]: a layer with top-2 of 9, padded, and one with top-3 of 300."""
    few = skewed_ids(num_tokens=num_tokens, num_layers=1, num_experts=9, top_k=2, seed=seed)
    many = skewed_ids(num_tokens=num_tokens, num_layers=1, num_experts=300, top_k=3, seed=seed)
    padded = np.concatenate([few, np.full((num_tokens, 1, 1), -1)], axis=2)
    return np.concatenate([padded, many], axis=1)


def write(path, *, num_tokens=(600, 5), **options):
    parts = [ids_of(count, seed) for seed, count in enumerate(num_tokens)]
    with TraceWriter(path, INFO, **options) as writer:
        numbers = [writer.open_sequence(f"d{i}") for i in range(len(parts))]
        for token in range(max(num_tokens)):  # Interleaved, token by token.
            for number, part in zip(numbers, parts, strict=True):
                if token < len(part):
                    writer.append(number, part[token : token + 1])
    return parts, writer


def test_round_trip_of_interleaved_sequences(tmp_path):
    parts, writer = write(tmp_path / "t.trace")
    trace = load_trace(tmp_path / "t.trace")
    assert trace.info == INFO
    assert trace.domains == ("d0", "d1")
    assert trace.num_tokens == 605
    assert trace.token_ids_T is None
    for got, want in zip(trace, parts, strict=True):
        assert np.array_equal(got, want)
    assert writer.num_bytes == (tmp_path / "t.trace").stat().st_size
    # Compact: below 2 bytes for each of the 5 ids of a token.
    assert writer.num_bytes < 605 * 5 * 2


def test_token_ids_only_on_request(tmp_path):
    ids = ids_of(3, 0)
    with TraceWriter(tmp_path / "t.trace", INFO, with_token_ids=True) as writer:
        writer.append(writer.open_sequence(), ids, np.array([7, 70_000, 2]))
    assert load_trace(tmp_path / "t.trace").token_ids_T.tolist() == [7, 70_000, 2]
    with TraceWriter(tmp_path / "u.trace", INFO) as writer, pytest.raises(AssertionError):
        writer.append(writer.open_sequence(), ids, np.array([1, 2, 3]))


def test_a_full_file_stays_readable_and_within_its_bound(tmp_path):
    path, bound = tmp_path / "t.trace", 3000
    with TraceWriter(path, INFO, max_bytes=bound) as writer:
        number = writer.open_sequence()
        kept = [writer.append(number, ids_of(FRAME_TOKENS, seed)) for seed in range(9)]
    assert kept[0] and not kept[-1] and writer.full
    assert path.stat().st_size <= bound
    num_kept = sum(kept)
    assert np.array_equal(
        next(iter(load_trace(path))),
        np.concatenate([ids_of(FRAME_TOKENS, i) for i in range(num_kept)]),
    )
    with pytest.raises(ConfigError, match="no room for its header"):
        TraceWriter(path, INFO, max_bytes=10)


def test_a_tail_that_was_cut_off_can_be_salvaged(tmp_path):
    path = tmp_path / "t.trace"
    parts, _ = write(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="is cut off in the frame at byte"):
        load_trace(path)
    trace = read_trace(path, salvage=True)
    assert np.array_equal(next(iter(trace)), parts[0])


def test_any_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "t.trace"
    write(path, num_tokens=(20, 5))
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=path.name):
            load_trace(path)


def test_other_files_are_refused(tmp_path):
    cases = {
        "empty": b"",
        "text": b"hello, this is no trace at all",
        "version": b"HOTTRACE" + bytes([9]) + bytes(40),
        "zip": b"PK\x03\x04" + bytes(40),
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            load_trace(tmp_path / name)
    with pytest.raises(CheckpointError, match="there is no trace"):
        load_trace(tmp_path / "absent")


def flat_archive(tmp_path, **changes):
    ids = skewed_ids(num_tokens=30, num_layers=2, num_experts=8, top_k=2, seed=0).astype(np.uint8)
    described = {
        "model": "m",
        "experts": 8,
        "license": "Apache-2.0",
        "sequences": [{"dataset": "x", "start": 0, "tokens": 10}, {"start": 10, "tokens": 20}],
    } | changes
    np.savez(tmp_path / "f.npz", experts=ids)
    (tmp_path / "f.json").write_text(json.dumps(described))
    return tmp_path / "f.npz", ids


def test_flat_archive(tmp_path):
    path, ids = flat_archive(tmp_path)
    trace = load_trace(path)
    assert (trace.num_experts, trace.info.model, trace.domains) == ((8, 8), "m", ("x", ""))
    assert not trace.info.inferred
    assert np.array_equal(np.concatenate(list(trace)), ids)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"experts": 3}, "the layer has 3"),
        ({"sequences": [{"start": 25, "tokens": 10}]}, r"covers tokens 25\.\.34, the file has 30"),
        ({"sequences": []}, "holds no sequence"),
        ({"sequences": [{"start": 1}]}, "is damaged"),
        ({"experts": None}, "is damaged"),
    ],
)
def test_flat_archive_with_a_wrong_description(tmp_path, changes, text):
    path, _ = flat_archive(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=text):
        load_trace(path)


def test_flat_archive_without_description_or_cut_off(tmp_path):
    path, _ = flat_archive(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="is damaged"):
        load_trace(path)
    path.write_bytes(whole)
    (tmp_path / "f.json").unlink()
    with pytest.raises(CheckpointError, match=r"no `f\.json` beside it"):
        load_trace(path)


def test_archive_of_domains(tmp_path):
    path = tmp_path / "d.npz"
    ids = {
        name: np.stack(
            [
                skewed_ids(num_tokens=9, num_layers=2, num_experts=8, top_k=2, seed=i)
                for i in range(2)
            ]
        )
        for name in ("ja", "chat")
    }
    np.savez(path, **ids)
    trace = load_trace(path, num_experts=8)
    assert trace.domains == ("ja", "chat")
    assert not trace.info.inferred
    assert load_trace(path).info.inferred
    own = trace.select(parity="odd", domains=("chat",))
    assert np.array_equal(next(iter(own)), ids["chat"][1])
    assert [sequence.index for sequence in own.sequences] == [3]
    np.savez(path, a=ids["ja"], b=np.zeros((1, 9, 3, 2), int))
    with pytest.raises(CheckpointError, match="no known trace layout"):
        load_trace(path)
    np.savez(path, a=ids["ja"].astype(float))
    with pytest.raises(CheckpointError, match="not integer ids"):
        load_trace(path)
    with pytest.raises(CheckpointError, match="the layer has 2"):
        np.savez(path, a=ids["ja"])
        load_trace(path, num_experts=2)


def test_select_refuses_what_is_not_there():
    trace = make_trace([ids_of(4, 0)[:, 1:]], num_experts=300, domains=["a"])
    with pytest.raises(ConfigError, match="no domain `b`"):
        trace.select(domains=("b",))
    with pytest.raises(ConfigError, match="no sequence is left") as none_left:
        trace.select(parity="odd")
    assert "--profile-from none" in (none_left.value.hint or "")
    with pytest.raises(ConfigError, match="sequences `third`"):
        trace.select(parity="third")


def test_counts_ignore_padding():
    trace = make_trace([np.array([[[0, 2]], [[2, 1]]])], num_experts=4)
    assert trace.total_counts().tolist() == [[1, 1, 2, 0]]


def test_the_trace_in_the_package() -> None:
    """Routing of the embedded model: its shape, and that no expert or domain is left out."""
    trace = load_trace("pocket")
    assert (trace.info.model, trace.num_layers, trace.max_experts) == ("pocket", 6, 32)
    assert {sequence.domain for sequence in trace.sequences} == {
        *("chat", "code_python", "de", "en_prose"),
    }
    assert trace.num_tokens == 4 * 6 * 1024


def test_a_trace_that_is_not_there() -> None:
    with pytest.raises(CheckpointError, match="there is no trace `none") as caught:
        load_trace("none.npz")
    assert "`pocket`" in (caught.value.hint or "")


def test_a_trace_that_cannot_be_read(tmp_path, monkeypatch) -> None:
    (tmp_path / "closed").touch()

    def refuse(*_: object) -> None:  # a mode would not stop root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(CheckpointError, match="closed` cannot be read: Permission denied"):
        load_trace(tmp_path / "closed")
