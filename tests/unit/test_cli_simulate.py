"""`hotset simulate` from flags to table, JSON and picture; wrong flags say what to do."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import typer
from routing import make_trace, skewed_ids
from typer.testing import CliRunner

from hotset.cli.simulate import simulate
from hotset.core.errors import ConfigError, HotsetError
from hotset.core.profile import Profile
from hotset.core.trace import load_trace
from hotset.core.trace_file import TraceWriter

app = typer.Typer()
app.command()(simulate)


@pytest.fixture
def trace_path(tmp_path):
    ids = [
        skewed_ids(num_tokens=60, num_layers=2, num_experts=16, top_k=2, seed=i) for i in range(4)
    ]
    trace = make_trace(ids, num_experts=16)
    path = tmp_path / "t.trace"
    with TraceWriter(path, trace.info) as writer:
        for index, part in enumerate(ids):
            writer.append(writer.open_sequence("ab"[index // 2]), part)
    return path


def run(*args: object):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_json_rows(trace_path):
    out = json.loads(run(trace_path, "--json", "--slots", "0.25,0.5").stdout)
    assert (out["layers"], out["experts"], out["sequences"], out["tokens"]) == (2, 16, 2, 120)
    rows = out["rows"]
    assert {row["slots"] for row in rows} == {0.25, 0.5}
    rates = {(row["policy"], row["half_life"], row["slots"]): row["hit_rate"] for row in rows}
    assert len(rates) == len(rows) == 2 * (6 + 6)
    assert rates["belady", None, 0.5] == max(rates.values())
    for choice in out["best_half_life"]:
        assert rates["half-life", choice["half_life"], choice["slots"]] == choice["hit_rate"]
        low, high = choice["hit_rate_95"]
        assert low <= choice["hit_rate"] <= high


def test_table_has_every_condition(trace_path):
    args = ("--policy", "lru", "--policy", "half-life", "--half-life", "4,inf", "--slots", "0.25")
    lines = run(trace_path, *args).stdout.splitlines()
    assert lines[0].rstrip() == "made up: 2 layers, 16 experts, 2 sequences, 120 tokens"
    text = "\n".join(lines)
    for label in ("0.25", "lru", "half-life 4", "half-life inf", "best half-life"):
        assert label in text


def test_many_slot_counts_stay_readable_on_a_narrow_terminal(trace_path):
    slots = [f"{count / 16:g}" for count in range(1, 17)]
    args = ("--policy", "lru", "--slots", ",".join(slots))
    text = run(trace_path, *args).stdout
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("lru") == 3


def test_choice_of_sequences_and_profile(trace_path, tmp_path):
    args = ("--policy", "static-uniform", "--slots", "0.25", "--json")

    def rate(*more: object) -> float:
        return json.loads(run(trace_path, *args, *more).stdout)["rows"][0]["hit_rate"]

    own = rate("--sequences", "odd", "--profile-from", "odd")
    held_out = rate("--sequences", "odd", "--profile-from", "even")
    assert own > held_out
    odd = load_trace(trace_path).select(parity="odd")
    Profile.from_trace(odd).save(tmp_path / "p.json")
    assert rate("--sequences", "odd", "--profile-from", tmp_path / "p.json") == own
    one = json.loads(run(trace_path, *args, "--domain", "b").stdout)
    assert (one["sequences"], one["tokens"]) == (1, 60)


def test_without_a_profile_the_static_sets_are_left_out(trace_path):
    rows = json.loads(run(trace_path, "--json", "--profile-from", "none").stdout)["rows"]
    assert {row["policy"] for row in rows} == {"lru", "half-life", "hindsight-static", "belady"}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--slots", "a quarter"), "`--slots` is `a quarter`, which is not a list of numbers"),
        (("--slots", "25"), "`--slots` has a share of 25, it must be in 0..1"),
        (("--slots", "nan"), "`--slots` has a share of nan"),
        (("--policy", "lru2"), "unknown policy `lru2`"),
        (("--half-life", "0"), "`--half-life` is 0, the least is 0.1 steps"),
        (("--half-life", "nan"), "`--half-life` is nan, the least is 0.1 steps"),
        (("--prior-weight", "inf"), "`--prior-weight` is inf, it must be a number from 0 on"),
        (("--domain", "c"), "no domain `c`\n\nhint: it has a, b"),
        (("--sequences", "first"), "`--sequences` is `first`\n\nhint: one of all, even, odd"),
        (("--machine", "none", "--shape", "tiny"), "there is no machine `none`"),
        (("--machine", "h200", "--shape", "none"), "unknown shape `none`"),
        (("--profile-from", "nothing.json"), "profile `nothing.json` cannot be read"),
        (("--experts", "99"), "has 16 experts, not 99"),
        (("--experts", "-1"), "`--experts` is -1, the least is 1"),
        (("--experts", str(10**30)), "the most is 4095"),
        (("--plot", "x.pdf"), "end it in .png or .svg"),
        (("--policy", "static-global", "--profile-from", "none"), "needs a profile"),
        (("--victims", "0"), "`--victims` is 0, the least is 1"),
        (("--victims", "128"), "`--victims` is 128, the most is 127"),
        (("--wish-lag", "-1"), "`--wish-lag` is -1, the least is 0"),
        (("--wish-lag", str(10**30)), "the most is 64"),
    ],
)
def test_wrong_flags_are_refused(trace_path, args, text):
    with pytest.raises(HotsetError) as raised:
        run(trace_path, *args)
    assert text in str(raised.value)


def test_what_is_wrong_with_the_package_s_trace_is_not_said_of_a_missing_file():
    with pytest.raises(HotsetError, match="the layer has 5") as raised:
        run("pocket", "--experts", "5")
    assert raised.value.hint is None


def test_one_sequence_has_no_odd_ones(tmp_path):
    """The hint is a command line that works, and what it says of a text is so."""
    path = tmp_path / "one.trace"
    ids = skewed_ids(num_tokens=60, num_layers=2, num_experts=16, top_k=2, seed=0)
    with TraceWriter(path, make_trace([ids], num_experts=16).info) as writer:
        writer.append(writer.open_sequence("a"), ids)
    with pytest.raises(ConfigError, match="there is 1 sequence") as raised:
        run(path)
    flags = (raised.value.hint or "").split("`")[1].split()
    assert run(path, *flags, "--policy", "lru", "--slots", "0.5")


def test_forecast_from_sequences_or_a_profile_file(trace_path, tmp_path):
    args = ("--policy", "forecast", "--slots", "0.25", "--json")
    fitted = json.loads(run(trace_path, *args).stdout)["rows"]
    odd = load_trace(trace_path).select(parity="odd")
    Profile.from_trace(odd, with_forecast=True).save(tmp_path / "p.npz")
    Profile.from_trace(odd).save(tmp_path / "plain.json")
    assert (
        json.loads(run(trace_path, *args, "--profile-from", tmp_path / "p.npz").stdout)["rows"]
        == fitted
    )
    plain = ("--profile-from", tmp_path / "plain.json")
    with pytest.raises(ConfigError, match="`forecast` needs a profile"):
        run(trace_path, *args, *plain)
    rows = json.loads(run(trace_path, "--json", *plain).stdout)["rows"]
    assert "forecast" not in {row["policy"] for row in rows}


def test_a_profile_of_another_model_is_refused(trace_path, tmp_path):
    other = make_trace([np.zeros((4, 2, 1), int)], num_experts=3)
    Profile.from_trace(other).save(tmp_path / "p.npz")
    with pytest.raises(ConfigError, match="of another model: experts per layer 16 against 3"):
        run(trace_path, "--profile-from", tmp_path / "p.npz")


def test_plot_without_matplotlib_says_how_to_get_it(trace_path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "hotset\[plot\]"'):
        run(trace_path, "--plot", tmp_path / "x.png")


def test_a_plot_that_cannot_be_written_is_refused(trace_path, tmp_path):
    (tmp_path / "x.png").mkdir()
    with pytest.raises(HotsetError, match=r"`--plot .*x\.png` cannot be written: Is a directory"):
        run(trace_path, "--plot", tmp_path / "x.png")


def test_plot_is_drawn(trace_path, tmp_path):
    pytest.importorskip("matplotlib")
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        run(
            trace_path, "--plot", tmp_path / f"x{suffix}", "--half-life", "4", "--slots", "0.25,0.5"
        )
        assert (tmp_path / f"x{suffix}").read_bytes().startswith(magic)


def test_speed_is_predicted_for_a_machine_and_a_shape() -> None:
    args = ["pocket", "--slots", "0.25,0.5", "--policy", "lru", "--machine", "h200"]
    result = CliRunner().invoke(app, [*args, "--shape", "tiny", "--json"])
    assert result.exit_code == 0, result.exception
    rows = json.loads(result.stdout)["rows"]
    assert rows[0]["tokens_per_second"] < rows[1]["tokens_per_second"]
    table = CliRunner().invoke(app, [*args, "--shape", "tiny"])
    assert "predicted tokens/s" in table.stdout
    alone = CliRunner().invoke(app, args)
    assert "needs both `--machine` and `--shape`" in str(alone.exception)


def test_a_model_is_run_on_a_text_and_replayed(tmp_path) -> None:
    text, kept = tmp_path / "words.txt", tmp_path / "t.trace"
    text.write_text("The cat sat on the mat, and the dog sat on the cat. " * 40)
    model = ("pocket", "--text", text, "--device", "cpu", "--tokens", "96", "--window", "24")
    replay = ("--slots", "0.25,0.5", "--policy", "half-life", "--half-life", "4,16")
    args = (*model, *replay, "--trace", kept, "--machine", "h200", "--json")
    out = json.loads(run(*args).stdout)
    assert (out["sequences"], out["tokens"]) == (2, 48)  # the even ones of four
    trace = load_trace(kept)
    assert trace.num_tokens == 96 and trace.info.model == "pocket" and trace.domains == ("words",)
    rows = {(row["slots"], row["half_life"]): row for row in out["rows"]}
    # What was kept replays alike, and more slots are faster on the model's own shape.
    again = json.loads(run(kept, *replay, "--json").stdout)
    assert [row["hit_rate"] for row in again["rows"]] == [row["hit_rate"] for row in out["rows"]]
    assert rows[0.5, 16]["tokens_per_second"] > rows[0.25, 16]["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--vram", "1GiB"), "`--vram` is for running a model, and without `--text`"),
        (("--trace", "t"), "`--trace` is for running a model"),
        (("--text", "TEXT", "--shape", "tiny", "--machine", "h200"), "leave `--shape` out"),
        (("--text", "TEXT", "--experts", "8"), "`--experts` is for trace files"),
        (("--text", "TEXT", "--tokens", "0"), "`--tokens` is 0"),
        (("--text", "missing"), "`--text missing` cannot be read"),
    ],
)
def test_flags_of_a_trace_and_of_a_model(tmp_path, args: tuple[str, ...], message: str) -> None:
    (tmp_path / "words.txt").write_text("words")
    flags = [str(tmp_path / "words.txt") if arg == "TEXT" else arg for arg in args]
    with pytest.raises(HotsetError) as error:
        run("pocket", *flags)
    assert message in f"{error.value} {error.value.hint}"


def test_a_model_without_a_text_is_told_of_it(tmp_path) -> None:
    with pytest.raises(HotsetError) as error:
        run(tmp_path)
    assert "of a model, give a text to run: `--text FILE`" in str(error.value.hint)
