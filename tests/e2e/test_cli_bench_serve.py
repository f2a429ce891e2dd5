"""`hotset bench serve` on the tiny shape: its rows, its sizes, and what it refuses."""

from __future__ import annotations

import json

import pytest

from hotset.bench.random_weights import RandomWeights
from hotset.bench.serve import AHEAD_TOKENS, COST_MODEL, WARM_TOKENS, Load, Timeline, with_slots
from hotset.bench.shapes import shape_config
from hotset.core.config import EngineConfig
from hotset.core.errors import CapacityError
from hotset.core.units import MIB
from hotset.runtime.planning import plan_engine
from hotset.runtime.requests import Event

TINY = ("bench", "serve", "--shape", "tiny", "--device", "cpu")


def test_rows_of_streams_and_of_a_prompt_beside_them(run) -> None:
    done = run(
        *TINY,
        *("--streams", "1,3", "--slots", "0.25", "--tokens", "8", "--long-prompt", "96", "--json"),
    )
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    found = {(row["case"], row["figure"]): row for row in rows}
    assert len(found) == len(rows), "two rows have one name"
    for streams in ("1 streams", "3 streams"):
        case = f"tiny, 25% slots, {streams}"
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
        assert 0 < found[case, "hit rate"]["p50"] < 1
    case = "tiny, 25% slots, 3 streams and a prompt of 96 tokens"
    assert found[case, "first token of the prompt"]["p50"] > 0
    assert found[case, "rate that streams keep"]["p50"] >= 0


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_a_share_of_slots_is_what_the_plan_has(share: float) -> None:
    source = RandomWeights(shape_config("tiny"))
    config = Load((2,), 16, 8, 64).config(EngineConfig(model="random tiny", device="cpu"))
    _, plan = plan_engine(source.geometry, with_slots(source, config, share))
    assert plan.num_slots == round(share * source.geometry.num_records)


def test_slots_that_do_not_fit_are_refused() -> None:
    source = RandomWeights(shape_config("tiny"))
    config = EngineConfig(model="random", device="cpu", ram_bytes=64 * MIB)
    with pytest.raises(CapacityError):
        with_slots(source, Load((2,), 16, 8, 64).config(config), 1.0)


def test_a_load_has_room_for_all_of_it() -> None:
    load = Load((1, 4), 64, 128, 8192)
    config = load.config(EngineConfig(model="random"))
    assert config.max_batch == 5
    assert config.context_tokens == 8193
    assert config.kv_tokens == 4 * (64 + 1024) + 8193
    alone = Load((1, 4), 64, 128, 0)
    assert alone.config(config).max_batch == 4
    assert alone.context_tokens == 64 + WARM_TOKENS + 128 + 4 * AHEAD_TOKENS


def test_gaps_are_within_a_stream_and_behind_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(times={1: [], 2: []})
    now = iter([1.0, 2.0, 2.5, 4.0])
    monkeypatch.setattr("hotset.bench.serve.time.perf_counter", lambda: next(now))
    for stream in (1, 2, 1, 2):
        timeline.take(Event(request_id=stream, token_id=0))
    assert timeline.gaps_ms(0.0) == [1500.0, 2000.0]
    assert timeline.gaps_ms(1.5) == [2000.0]
    assert timeline.num_since(2.0) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--streams", "0"), "`--streams` has 0, it must be whole numbers from 1 on"),
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
