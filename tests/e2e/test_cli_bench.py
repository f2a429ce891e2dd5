"""`hotset bench`: wrong flags are refused before anything is measured; rows as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hotset.bench.random_weights import RandomWeights
from hotset.core.errors import CapacityError
from hotset.experts.store import ExpertStore

# Of the whole grammar of `bench decode`, as little as shows every row.
DECODE = ("--context", "16", "--most-context", "128", "--steps", "4", "--offload-layers", "1")
TINY = ("--shape", "tiny", "--device", "cpu")


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("weights are made")

    monkeypatch.setattr(RandomWeights, "fill_experts", fail)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("experts", "--hits", "2"), "`--hits` has a share of 2, it must be in 0..1"),
        (("experts", "--hits", "-1"), "`--hits` has a share of -1, it must be in 0..1"),
        (("experts", "--hits", "0.5,nan"), "`--hits` has a share of nan, it must be in 0..1"),
        (("experts", "--hits", "some"), "`--hits` is `some`, which is not a list of numbers"),
        (("experts", "--tokens", "0"), "`--tokens` has 0, it must be whole numbers from 1 on"),
        (("experts", "--tokens", "1.5"), "`--tokens` has 1.5, it must be whole numbers from 1 on"),
        (("experts", "--tokens", "inf"), "`--tokens` has inf, it must be whole numbers from 1 on"),
        (("experts", "--format", "int3"), "`--format int3` is not one of plain, fp8, int4, nvfp4"),
        (("experts", "--layers", "0"), "`--layers` is 0, the least is 1"),
        (("experts", "--rows", "none/rows.jsonl"), "`--rows none/rows.jsonl` cannot be written"),
        (
            ("experts", "--tokens", "9999999999"),
            "`--tokens` has 9999999999, the most is 2147483647",
        ),
        (("experts", "--device", "xpu"), "`--device` is `xpu`"),
        (("load", "--device", "xpu"), "`--device` is `xpu`"),
        (("load", "--folder", "/proc"), "`--folder /proc` is no folder that can be written to"),
        (("experts", "--rows", "."), "`--rows .` cannot be written: Is a directory"),
        (("experts", "--layers", "1025"), "`--layers` is 1025, the most is 1024"),
        (("generate", "--layers", "-1"), "`--layers` is -1, the least is 1"),
        (("generate", "--prompt-tokens", "0"), "`--prompt-tokens` is 0, the least is 1"),
        (("generate", "--max-tokens", "1"), "`--max-tokens` is 1, the least is 2"),
        (("generate", "--context", str(10**23)), "`--context` is 100000000000000000000000, the"),
        (("generate", "--rows", "."), "`--rows .` cannot be written"),
        (
            ("load", "--format", "gptq"),
            "`--format gptq` is not one of plain, int4, fp8, nvfp4, mxfp4",
        ),
        (("load", "--folder", "none"), "`--folder none` is no folder that can be written to"),
        (("load", "--threads", "0"), "`--threads` is 0, the least is 1"),
        (("decode", "x.npz", "--policies", "mru"), "`--policies` has `mru`, it knows half-life"),
        (("decode", "x.npz", "--policies", "forecast"), "`--policies` has `forecast`, it knows"),
        (("decode", "x.npz", "--policies", "lru:4"), "policy `lru` has no `half_life`"),
        (("decode", "x.npz", "--policies", "random:4"), "`--policies` has `random:4`, which has"),
        (("decode", "x.npz", "--policies", "half-life:x"), "`--policies` has `half-life:x`, which"),
        (("decode", "x.npz", "--policies", "half-life:0"), "`half_life` is 0, the least is 0.1"),
        (("decode", "x.npz", "--batch", "1,65"), "`--batch` has 65, the most is 64"),
        (("decode", "x.npz", "--plot", "x.pdf"), "`--plot` is `x.pdf`"),
        (("decode", "x.npz", "--steps", "0"), "`--steps` is 0, the least is 1"),
        (("decode", "x.npz", "--most-context", "8"), "`--most-context` is 8, the least is 1344"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_measured(
    run, flags: tuple[str, ...], message: str
) -> None:
    done = run("bench", flags[0], *TINY, *flags[1:])
    assert done.code == 2 and done.out == ""
    assert done.err.startswith(f"error: {message}")


@pytest.mark.usefixtures("no_weights")
def test_a_context_too_short_is_refused_before_loading(run) -> None:
    done = run("bench", "generate", "--context", "64", *TINY)
    assert done.code == 2 and "do not fit the context of 64" in done.err


@pytest.mark.usefixtures("no_weights")
def test_the_checks_above_can_fail(run) -> None:
    assert "weights are made" in run("bench", "experts", *TINY).err


def test_a_refused_arena_leads_to_a_smaller_shape(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise CapacityError("no memory", hint="see `hotset plan`")

    monkeypatch.setattr(ExpertStore, "__init__", refuse)
    done = run("bench", "experts", *TINY)
    assert done.code == 2
    assert done.last_words == [
        "error: no memory",
        "hint: cut the depth with `--layers`, or use `--shape tiny`",
    ]


def test_figures_have_units(run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    done = run("bench", "experts", "--hits", "1", *TINY, "--rows", rows)
    assert done.code == 0, done.err
    kernels = done.out.splitlines()[-1]
    assert kernels.count(" ms") == 2 and "speed of light" in kernels
    assert [json.loads(line)["bench"] for line in rows.read_text().splitlines()] == [
        *(["rates"] * 3),
        "experts",
    ]
    done = run("bench", "generate", "--prompt-tokens", "4", "--max-tokens", "2", *TINY)
    assert "host plan" in done.out and "MiB" in done.out and "bytes\n" not in done.out


def test_json_is_one_object(run) -> None:
    done = run("bench", "experts", "--hits", "1", *TINY, "--json")
    data = json.loads(done.out)
    assert list(data) == ["rows"] and len(data["rows"]) == 4


def test_prefill_beside_what_one_would_run_instead(run, tmp_path: Path) -> None:
    """A ring on a CPU, several chunks, every comparison, and the picture of it."""
    picture = tmp_path / "prefill.svg"
    flags = ("--tokens", "1,70,1030", "--staging", "ring", "--prefill-chunk", "512")
    refused = run("bench", "prefill", *flags, *TINY, "--vram", "1MiB").err
    least = float(refused.partition("least that works is ")[2].split()[0])
    small = ("--vram", f"{least + 0.1:.2f}MiB", "--slots", "0.25")  # 100 KiB: some 6 slots of 16
    short = ("--offload-layers", "1", "--repeats", "1")
    done = run("bench", "prefill", *flags, *small, *short, *TINY, "--plot", picture, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    first = {row["case"]: row for row in rows if row["figure"] == "first token"}
    case = "tiny, 25% slots, 1030 tokens"
    offload = "accelerate offload, 1 layers scaled to all"
    assert first.keys() >= {case, f"{case}, groups that wait", f"{case}, {offload}"}
    assert f"tiny, 25% slots, 70 tokens, {offload}" in first
    assert first[case]["ratio_to_sol"] > 0 and first[f"{case}, {offload}"]["ratio_to_baseline"] > 0
    link = next(r for r in rows if r["case"] == case and r["figure"] == "link bytes")
    # 2 layers, 6 of 8 experts without a slot, each once for all chunks, 12 KiB.
    assert link["p50"] == 2 * 6 * 12288
    # What the ring really copied, of what it could copy at most: here every expert is used.
    copied = next(r for r in rows if r["case"] == case and r["figure"] == "copied bytes")
    assert (copied["p50"], copied["ratio_to_baseline"]) == (link["p50"], 1.0)
    rate = next(r for r in rows if r["case"] == case and r["figure"] == "copy rate while copying")
    assert rate["p50"] > 0 and rate["baseline"] == "the copy engine alone"
    predicted = next(
        r for r in rows if r["case"] == case and r["figure"] == "predicted first token"
    )
    assert first[case]["baseline"] == "prediction"
    assert first[case]["ratio_to_baseline"] == pytest.approx(first[case]["p50"] / predicted["p50"])
    assert "speed of light" in picture.read_text()


def test_prefill_refuses_more_slots_than_planned(run) -> None:
    done = run("bench", "prefill", "--tokens", "8", "--slots", "1", "--vram", "64.3MiB", *TINY)
    assert done.code != 0 and "the plan has" in done.err


def test_prefill_plans_the_slots_that_it_is_asked_for(run) -> None:
    """Without `--vram`: a plan of the whole device would have a slot for every expert."""
    flags = ("--tokens", "70", "--slots", "0.25", "--staging", "ring", "--offload-layers", "0")
    done = run("bench", "prefill", *flags, "--repeats", "1", *TINY, "--json")
    assert done.code == 0, done.err
    rows = {row["figure"]: row for row in json.loads(done.out)["rows"]}
    assert rows["copied bytes"]["p50"] == 2 * 6 * 12288


def test_prefill_of_a_format(run) -> None:
    flags = ("--tokens", "8", "--slots", "0.5", "--offload-layers", "0", "--repeats", "1")
    done = run("bench", "prefill", "--format", "int4", *flags, *TINY)
    assert done.code == 0, done.err
    assert "tiny int4, 50% slots, 8 tokens: first token" in done.out


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_experts_of_a_format_are_measured(run, name: str) -> None:
    done = run("bench", "experts", "--format", name, "--hits", "0.5", *TINY)
    assert done.code == 0
    assert f"tiny {name}, 1 token, 50% hits" in done.out


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six texts of a model with 4 experts, top-1: layer 0 goes round all four of them, layer 1
    uses the last one alone. The tiny shape, 8 experts and top-2, replays two streams of it."""
    ids = np.stack([np.arange(80) % 4, np.full(80, 3)], axis=1)[None, :, :, None]
    path = tmp_path_factory.mktemp("trace") / "made-up.npz"
    np.savez(path, prose=np.repeat(ids, 6, axis=0).astype(np.uint8))
    return path


def test_decode_by_policy_slots_and_batch(run, trace: Path, tmp_path: Path) -> None:
    """Every row, against every baseline, and the picture."""
    picture = tmp_path / "decode.svg"
    policies = ("--policies", "half-life:4,static-global,static-uniform,none", "--slots", "0.25")
    batches = ("--batch", "1,2", "--vram", "1GiB")
    done = run("bench", "decode", trace, *policies, *batches, *DECODE, *TINY, "--plot", picture,
               "--json")  # fmt: skip
    assert done.code == 0, done.err
    rows = {(r["case"], r["figure"]): r for r in json.loads(done.out)["rows"]}
    for batch in ("", ", batch 2"):
        none = f"tiny, no cache, 16 context{batch}"
        assert rows[none, "hit rate"]["p50"] == 0
        for policy in ("half-life 4", "static-global", "static-uniform"):
            case = f"tiny, 25% slots, {policy}, 16 context{batch}"
            assert rows[case, "whole step"]["ratio_to_sol"] > 0
            assert rows[case, "whole step"]["baseline"] == "prediction"
            assert rows[case, "decode"]["baseline"] == "no cache"
            against = rows[case, "decode, against accelerate offload"]
            theirs = f"tiny, 25% of layers on the device, accelerate offload, 16 context{batch}"
            ratio = rows[case, "decode"]["p50"] / rows[theirs, "decode"]["p50"]
            assert against["ratio_to_baseline"] == pytest.approx(ratio)
            assert rows[case, "link bytes per token"]["baseline"] == "static-uniform"
    case = "tiny, 25% slots, {}, 16 context"
    # Two slots a layer: both streams of layer 1, and of layer 0 one of four ids in each or two of
    # one; so 1 + 0.25 of 2 in the mean. With all four slots where they are used most it is the
    # same, as layer 1 uses no more than two.
    assert rows[case.format("static-uniform"), "hit rate"]["p50"] == pytest.approx(0.625)
    assert rows[case.format("static-uniform"), "slots"]["p50"] == 4 * 12288
    # Misses 1.5 of the 4 routed ids, 12 KiB each.
    assert rows[case.format("static-uniform"), "link bytes per token"]["p50"] == 1.5 * 12288
    fills = "tiny, every expert missing, 16 context"
    assert rows[fills, "misses that were filled"]["p50"] == 1
    assert rows[fills, "hit rate, fills on"]["p50"] == 0
    assert rows[fills, "step, fills on"]["baseline"] == "fills off"
    text = picture.read_text()
    assert all(name in text for name in ("half-life 4, batch 2", "no cache", "accelerate offload"))


def test_decode_with_a_budget(run, trace: Path) -> None:
    """A budget is worth the slots for which it has room, beside all else in the plan."""
    flags = ("--vram", "1GiB", "--policies", "random", "--offload-layers", "0", *DECODE[:-2], *TINY)
    done = run("bench", "decode", trace, "--slots", "1MiB", *flags)
    assert done.code == 2 and done.last_words[0].startswith(
        "error: `--slots 1MiB`: what is no slot"
    )
    least = float(done.last_words[0].split()[-2])  # MiB
    budget = f"{least + 0.1:.2f}MiB"  # 100 KiB or so: half of 16 records of 12 KiB
    done = run("bench", "decode", trace, "--slots", budget, *flags, "--json")
    assert done.code == 0, done.err
    found = {r["figure"]: r["p50"] for r in json.loads(done.out)["rows"] if "random" in r["case"]}
    assert found["slots"] == pytest.approx(0.1 * 2**20, abs=0.01 * 2**20)  # two decimals of MiB
    assert found["device memory with them"] == pytest.approx((least + 0.1) * 2**20, rel=1e-3)


def test_decode_wants_room_for_all(run, trace: Path) -> None:
    done = run("bench", "decode", trace, *DECODE, *TINY)  # on a CPU without a budget: no slots
    assert done.code == 2 and "this benchmark wants one for each" in done.err


def test_decode_wants_a_text_for_each_row(run, trace: Path) -> None:
    done = run("bench", "decode", trace, "--vram", "1GiB", "--batch", "4", *DECODE, *TINY)
    assert done.code == 2 and "for 4 rows" in done.err


@pytest.mark.parametrize("format_", ["plain", "fp8"])
def test_loading_beside_plain_reads(run, tmp_path: Path, format_: str) -> None:
    done = run(
        *("bench", "load", "--layers", "2", "--repeats", "1", "--threads", "2", "--json"),
        *("--format", format_, "--folder", tmp_path, *TINY),
    )
    rows = json.loads(done.out)["rows"]
    figures = ["plain reads", "load", "most memory beside the arena"]
    assert [row["figure"] for row in rows] == 2 * figures
    assert all(row["p50"] > 0 for row in rows if row["unit"] == "GB/s")
    assert rows[1]["ratio_to_baseline"] == pytest.approx(rows[1]["p50"] / rows[0]["p50"])
    # Pieces of a few KiB: far below what loading may take beside the arena.
    assert rows[2]["p50"] < 64 * 2**20
    assert not list(tmp_path.iterdir())
