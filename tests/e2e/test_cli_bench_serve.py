"""`hotset bench serve` on the tiny shape: its rows, its sizes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotset.bench.random_weights import RandomWeights
from hotset.bench.replay import by_chance
from hotset.bench.serve import COST_MODEL
from hotset.bench.serve_load import (
    BESIDE_TOKENS,
    WARM_TOKENS,
    Load,
    loads_of,
    with_slots,
)
from hotset.bench.serve_run import ServeRun, Timeline
from hotset.bench.shapes import shape_config
from hotset.core.config import EngineConfig
from hotset.core.errors import CapacityError, HardwareError
from hotset.core.units import MIB
from hotset.runtime.engine import Engine
from hotset.runtime.planning import plan_engine
from hotset.runtime.requests import Event

TINY = ("bench", "serve", "--shape", "tiny", "--device", "cpu")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are no measurement: nothing has to settle."""
    monkeypatch.setattr("hotset.bench.serve_run.WARM_TOKENS", 4)
    monkeypatch.setattr("hotset.bench.serve_run.LONG_REPEATS", 2)


@pytest.mark.usefixtures("short")
def test_rows_of_streams_and_of_prompts_beside_them(run) -> None:
    done = run(
        *TINY,
        *("--streams", "1,3", "--slots", "0.25,0.75", "--tokens", "8", "--long-prompt", "96"),
        "--json",
    )
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    found = {(row["case"], row["figure"]): row for row in rows}
    assert len(found) == len(rows), "two rows have one name"
    hits = {}
    for share in ("25%", "75%"):
        name = f"tiny (experts by chance), {share} slots"
        for streams in ("1 stream", "3 streams"):
            require_rows_of_streams(found, f"{name}, {streams}")
        case = f"{name}, 2 streams and a prompt of 96 tokens"
        assert found[case, "first token of the prompt"]["p50"] > 0
        assert found[case, "rate that streams keep"]["repeats"] == 2
        against = found[f"{name}, 3 streams", "all streams, against one alone"]
        alone = found[f"{name}, 1 stream", "all streams"]["p50"]
        assert against["ratio_to_baseline"] == pytest.approx(against["p50"] / alone)
        hits[share] = found[f"{name}, 3 streams", "hit rate"]["p50"]
    # 8 steps of 2 layers use 68 experts or so, drawn evenly: each share is 0.06 off in one of
    # three cases, and these are 0.5 apart.
    assert 0.05 < hits["25%"] < 0.5 < hits["75%"] < 0.95


def require_rows_of_streams(found: dict[tuple[str, str], dict[str, Any]], case: str) -> None:
    speed, predicted = found[case, "all streams"], found[case, "all streams, predicted"]
    assert speed["baseline"] == COST_MODEL
    assert speed["ratio_to_baseline"] == pytest.approx(speed["p50"] / predicted["p50"])
    # A prediction adds to the speed of light.
    assert predicted["p50"] <= speed["sol"] * 1.0001
    gap, p99 = (
        found[case, f"between two tokens of a stream{tail}"]["p50"]
        for tail in ("", ", 99th percentile")
    )
    assert 0 < gap <= p99


@pytest.mark.usefixtures("short")
def test_a_trace_is_replayed(run, tmp_path: Path) -> None:
    """All tokens of this one go to the same two experts, which soon have slots."""
    np.savez(tmp_path / "trace.npz", prose=np.full((4, 64, 2, 2), [3, 7], dtype=np.uint8))
    done = run(
        *TINY,
        *("--trace", str(tmp_path / "trace.npz"), "--streams", "2", "--slots", "0.25"),
        *("--tokens", "4", "--long-prompt", "0", "--json"),
    )
    assert done.code == 0, done.err
    rows = {row["figure"]: row for row in json.loads(done.out)["rows"]}
    assert rows["hit rate"]["p50"] == 1.0
    assert rows["hit rate"]["case"] == "tiny, 25% slots, 2 streams"


def test_streams_that_end_too_early_are_said_with_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers of 14 tokens have 32 behind them never."""
    monkeypatch.setattr("hotset.bench.serve_load.BESIDE_TOKENS", 0)
    monkeypatch.setattr("hotset.bench.serve_load.WARM_TOKENS", 4)
    source, load = RandomWeights(shape_config("tiny", context_tokens=4096)), Load((2,), 16, 8, 96)
    config = load.config(EngineConfig(model="random tiny", device="cpu"))
    replay = by_chance(source.geometry, num_tokens=16, num_rows=2)
    with Engine(source, config) as engine:
        run = ServeRun(engine, load, replay)
        with run.routed(), pytest.raises(HardwareError) as refused:
            run.beside_prompts()
    said = "a stream ended at its 14 tokens before each has had 32 more: the 1 streams have had 14"
    assert refused.value.message.startswith(said)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_a_share_of_slots_is_what_the_plan_has(share: float) -> None:
    source = RandomWeights(shape_config("tiny", context_tokens=4096))
    config = Load((2,), 16, 8, 64).config(EngineConfig(model="random tiny", device="cpu"))
    _, plan = plan_engine(source.geometry, with_slots(source, config, share))
    assert plan.num_slots == round(share * source.geometry.num_records)


def test_slots_that_do_not_fit_are_refused() -> None:
    source = RandomWeights(shape_config("tiny", context_tokens=4096))
    config = EngineConfig(model="random", device="cpu", ram_bytes=64 * MIB)
    with pytest.raises(CapacityError):
        with_slots(source, Load((2,), 16, 8, 64).config(config), 1.0)


def test_a_load_has_room_for_all_of_it() -> None:
    load = Load((1, 4), 64, 128, 8192)
    config = load.config(EngineConfig(model="random"))
    assert (load.num_beside, config.max_batch) == (3, 4)
    assert config.context_tokens == 8193
    # In blocks of 32 tokens.
    assert config.kv_tokens == 4 * (64 + BESIDE_TOKENS) + 8224
    alone = Load((1, 4), 64, 128, 0)
    assert alone.config(config).max_batch == 4
    assert alone.context_tokens == 64 + WARM_TOKENS + 128 + 2
    # A stream, and the prompt beside it.
    assert Load((1,), 64, 128, 8192).num_rows == 2


def test_shares_that_one_engine_can_run() -> None:
    assert loads_of([0.25, 1.0, 0.5, 0.25]) == [[0.5, 0.25], [1.0]]
    assert loads_of([1.0, 0.0]) == [[0.0], [1.0]]


def test_gaps_are_within_a_stream_and_behind_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(times={1: [], 2: []})
    now = iter([1.0, 2.0, 2.5, 4.0])
    monkeypatch.setattr("hotset.bench.serve_run.time.perf_counter", lambda: next(now))
    for stream in (1, 2, 1, 2):
        timeline.take(Event(request_id=stream, token_id=0))
    assert timeline.gaps_ms(0.0) == [1500.0, 2000.0]
    assert timeline.gaps_ms(1.5) == [2000.0]
    assert timeline.num_since(2.0, {1, 2}) == 2
    assert timeline.num_since(2.0, {2}) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--streams", "0"), "`--streams` has 0, it must be whole numbers from 1 on"),
        (("--streams", "65"), "`--streams` has 65, the most is 64"),
        (("--slots", "2"), "`--slots` has a share of 2, it must be in 0..1"),
        (("--tokens", "1"), "`--tokens` is 1, the least is 2"),
        (("--long-prompt", "-1"), "`--long-prompt` is -1, the least is 0"),
        (("--prefill-share", "0"), "`--prefill-share` is 0"),
        (("--rows", "."), "`--rows .` cannot be written"),
    ],
)
def test_wrong_flags_are_refused(run, flags: tuple[str, ...], message: str) -> None:
    done = run(*TINY, *flags)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith(f"error: {message}")
