"""The cost model: formulas by hand, and predictions against every decode step that was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from plan_fakes import expert_of, qwen3_30b, t1
from repository import ROOT

from hotset.core import costmodel
from hotset.core.costmodel import (
    Rates,
    cpu_break_even,
    decode_step,
    distinct_experts,
    predict_load_seconds,
    predict_step,
)
from hotset.core.format_rates import DEQUANTISE_SHARE, SLOT_SHARE, slot_read_bytes
from hotset.core.formats import USUAL
from hotset.core.geometry import MoELayer
from hotset.core.machine import MachineDescription

RATES = Rates(50.0, 55.0, 4000.0, gemm_tflops=200.0, cpu_gbps=60.0, disk_gbps=2.0, layer_us=60.0)

# Prediction within 10% of the measurement is the goal that the model of the machine is held to.
WITHIN = 0.10
# Commits whose rows the figures of the machine file and the shares of formats are from. Of a
# command that ran at two, the rows of the later one count.
EXPERTS_AT, DECODE_AT, STREAMS_AT = "36f9174", ("c066fbe", "b7d3087"), "b7d3087"
# Choices of a token, hidden size, intermediate size of an expert, and whether it has biases.
SHAPES = {
    "qwen3-30b-a3b": (8, 2048, 768, False),
    "qwen3.6-35b-a3b": (8, 2048, 512, False),
    "gpt-oss-20b": (4, 2880, 2880, True),
}
BARE = "step without experts and sampling"


def test_a_step_at_the_speed_of_light_by_hand() -> None:
    model = replace(t1(), resident_read_bytes=8_000_000, kv_bytes_per_token=4000)
    cost = decode_step(model, RATES, hits=[3, 0, 4], misses=[1, 4, 0], context_tokens=1000)
    record = 98_304 / 1e6
    assert cost.resident_ms == pytest.approx(8 / 4000)
    assert cost.kv_ms == pytest.approx(4 / 4000)
    assert cost.experts_ms == pytest.approx(record * (1 / 50 + 4 / 50 + 4 / 4000))
    assert cost.layers_ms == 0
    assert cost.total_ms == pytest.approx(cost.resident_ms + cost.kv_ms + cost.experts_ms)


@pytest.mark.parametrize(("hit_rate", "slower"), [(0.0, 50.0), (1.0, 4000.0)])
def test_with_one_kind_of_reads_the_mean_is_exact(hit_rate: float, slower: float) -> None:
    cost = predict_step(t1(), RATES, hit_rates=[hit_rate] * 3, used=[4.0] * 3, context_tokens=0)
    assert cost.experts_ms == pytest.approx(3 * 4 * 98_304 / slower / 1e6)
    assert cost.layers_ms == pytest.approx(3 * 0.06)


def test_each_further_row_takes_time_in_every_layer() -> None:
    args: dict[str, Any] = {"hit_rates": [1.0] * 3, "used": [4.0] * 3, "context_tokens": 0}
    rates = replace(RATES, row_us=5.0)
    one, three = (predict_step(t1(), rates, num_rows=rows, **args) for rows in (1, 3))
    assert three.layers_ms - one.layers_ms == pytest.approx(3 * 2 * 0.005)


def test_the_mean_of_the_longer_read_is_no_less_than_the_longer_of_the_means() -> None:
    model, hit_rates, used = t1(), [0.3, 0.9, 0.99], [4.0, 4.0, 4.0]
    expected = predict_step(model, RATES, hit_rates=hit_rates, used=used, context_tokens=0)
    misses = [4 * (1 - rate) for rate in hit_rates]
    light = decode_step(
        model, RATES, hits=[4 * r for r in hit_rates], misses=misses, context_tokens=0
    )
    both = light.experts_ms + sum(4 * rate for rate in hit_rates) * 98_304 / 4000 / 1e6
    assert light.experts_ms <= expected.experts_ms <= both


@pytest.mark.parametrize("name", ["int4", "nvfp4"])
def test_hits_take_what_their_format_takes(name: str) -> None:
    """By hand: bytes of both projections at the format's share, misses at the link's rate; at the
    speed of light all formats are read as fast."""
    plain = expert_of(128, 128)
    expert = plain.in_format(USUAL[name])
    model = replace(t1(), layers=tuple(replace(x, expert=expert) for x in t1().layers))
    args: dict[str, Any] = {"used": [4.0] * 3, "context_tokens": 0}
    hits = predict_step(model, RATES, hit_rates=[1.0] * 3, **args).experts_ms
    bytes_ms = 3 * 4 * expert.record_bytes / 4000 / 1e6
    assert hits == pytest.approx(bytes_ms / SLOT_SHARE[name])
    misses = predict_step(model, RATES, hit_rates=[0.0] * 3, **args).experts_ms
    assert misses == pytest.approx(3 * 4 * expert.record_bytes / 50 / 1e6)
    light = decode_step(model, RATES, hits=[4.0] * 3, misses=[0.0] * 3, context_tokens=0)
    assert light.experts_ms == pytest.approx(bytes_ms)


def test_each_projection_is_read_at_the_share_of_its_own_format() -> None:
    whole = expert_of(128, 128).in_format(USUAL["mxfp4"])
    mixed = expert_of(128, 128).in_format(USUAL["mxfp4"], down=USUAL["plain"])
    up = sum(field.nbytes for field in whole.layout.fields if field.name.startswith("up"))
    assert slot_read_bytes(whole) == pytest.approx(whole.record_bytes / SLOT_SHARE["mxfp4"])
    want = up / SLOT_SHARE["mxfp4"] + mixed.record_bytes - up
    assert slot_read_bytes(mixed) == pytest.approx(want)


def test_every_format_has_its_shares() -> None:
    assert SLOT_SHARE.keys() == USUAL.keys()
    assert {"plain", *DEQUANTISE_SHARE} == USUAL.keys()
    assert all(0 < share <= 1 for share in (*SLOT_SHARE.values(), *DEQUANTISE_SHARE.values()))


def results() -> list[dict[str, Any]]:
    lines = (ROOT / "benchmarks/results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class MeasuredStep:
    """A whole decode step, or its experts alone, on an H200.

    Attributes:
        rest_ms: bytes of what is no expert, as the speed of light of the same run has them.
        layer_us: beyond its bytes, of the same run.
        used: distinct experts of a layer.
    """

    case: str
    num_layers: int
    ms: float
    hit_rate: float
    rest_ms: float = 0.0
    layer_us: float = 0.0
    used: float = 8.0
    num_rows: int = 1

    def layer(self) -> MoELayer:
        name, *format_ = self.case.split(",")[0].split(" (")[0].split()
        _, hidden, intermediate, has_bias = SHAPES[name]
        plain = replace(expert_of(hidden, intermediate), has_bias=has_bias)
        expert = plain.in_format(USUAL[(format_ or ["plain"])[0]])
        return replace(qwen3_30b().layers[0], expert=expert)

    def predicted_ms(self, **changed: float) -> float:
        """With the figures of the machine file and that layer time, or others."""
        layer = self.layer()
        rates = MachineDescription.load("h200").rates(record_bytes=layer.expert.record_bytes)
        model = replace(
            qwen3_30b(),
            layers=(layer,) * self.num_layers,
            num_layers=self.num_layers,
            kv_bytes_per_token=0,
            resident_read_bytes=round(self.rest_ms * rates.hbm_gbps * 1e6),
        )
        return predict_step(
            model,
            replace(rates, **{"layer_us": self.layer_us, **changed}),
            hit_rates=[self.hit_rate] * self.num_layers,
            used=[self.used] * self.num_layers,
            context_tokens=0,
            num_rows=self.num_rows,
        ).total_ms


def measured_steps() -> list[MeasuredStep]:
    """All whole steps of one token; the layer time is the one of the same run."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results():
        if row["bench"] == "decode" and row["commit"] in DECODE_AT:
            runs.setdefault((row["command"], row["commit"]), []).append(row)
    newest = {command: rows for (command, _), rows in runs.items()}  # rows are only ever added
    return [step for command, rows in newest.items() for step in steps_of(command, rows)]


def steps_of(command: str, rows: list[dict[str, Any]]) -> Iterator[MeasuredStep]:
    """Steps of one token of hotset itself, not of what it is compared with."""
    cut = re.search(r"--layers (\d+)", command)
    num_layers = int(cut[1]) if cut else 48
    (bare,) = (r for r in rows if r["figure"] == BARE and " 1024 tokens" in r["case"])
    layer_us = (bare["p50"] - bare["sol"]) / num_layers * 1e3
    for case, figures in by_case(rows).items():
        if {"whole step", "hit rate"} <= figures.keys():
            yield MeasuredStep(
                case,
                num_layers,
                figures["whole step"]["p50"],
                figures["hit rate"]["p50"],
                rest_ms=bare["sol"],
                layer_us=layer_us,
                used=SHAPES[case.split(",")[0].split()[0]][0],
            )


def by_case(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["figure"]] = row
    return found


def measured_experts() -> list[MeasuredStep]:
    """Experts of one token alone, in every format, all in slots."""
    return [
        MeasuredStep(row["case"], 8, row["p50"], 1.0)
        for row in results()
        if row["bench"] == "experts"
        and row["commit"] == EXPERTS_AT
        and "1 token, 100%" in row["case"]
    ]


def measured_streams() -> list[MeasuredStep]:
    """Steps of one to eight streams of 16 layers in BF16. How many experts they used is in the
    speed of light only: that of what is no expert is known, from `bench decode`."""
    rows = [r for r in results() if r["bench"] == "serve" and r["commit"] == STREAMS_AT]
    rest_ms, found = 1_235_000_000 / 4300e6, []
    rates = MachineDescription.load("h200").rates(record_bytes=9_437_184)
    for case, figures in by_case(rows).items():
        count = re.search(r" (\d) streams?$", case)
        if count is None:
            continue
        rows_ms = int(count[1]) * 1e3
        speed, hit_rate = figures["all streams"], figures["hit rate"]["p50"]
        read = max((1 - hit_rate) / rates.link_gbps, hit_rate / rates.hbm_gbps)
        used = (rows_ms / speed["sol"] - rest_ms) / (16 * 9_437_184 * read / 1e6)
        found.append(
            MeasuredStep(
                case,
                16,
                rows_ms / speed["p50"],
                hit_rate,
                rest_ms=rest_ms,
                layer_us=rates.layer_us,
                used=used,
                num_rows=int(count[1]),
            )
        )
    return found


def name_of(step: MeasuredStep) -> str:
    return f"{step.case}-{step.num_layers}"


@pytest.mark.parametrize("step", measured_steps(), ids=name_of)
def test_measured_steps_are_predicted(step: MeasuredStep) -> None:
    """From the layer time of the run itself; the experts' is one number for all."""
    assert step.predicted_ms() == pytest.approx(step.ms, rel=WITHIN)


@pytest.mark.parametrize("step", measured_experts(), ids=name_of)
def test_measured_experts_are_predicted(step: MeasuredStep) -> None:
    assert step.predicted_ms() == pytest.approx(step.ms, rel=WITHIN)


@pytest.mark.parametrize("step", measured_streams(), ids=name_of)
def test_measured_streams_are_predicted(step: MeasuredStep) -> None:
    """With the layer and row times of the machine file."""
    assert step.predicted_ms() == pytest.approx(step.ms, rel=WITHIN)


def test_all_measured_rows_are_looked_at() -> None:
    steps = measured_steps()
    assert len(steps) >= 40
    assert {step.case.split(",")[0].split(" (")[0] for step in steps} == {
        "qwen3-30b-a3b",
        "qwen3-30b-a3b int4",
        "qwen3-30b-a3b lossless",
        "gpt-oss-20b mxfp4",
        "qwen3.6-35b-a3b",
    }
    assert len(measured_experts()) == len(USUAL)
    assert len(measured_streams()) == 12


@pytest.mark.parametrize("without", ["layer_us", "experts_us"])
def test_without_either_time_measured_steps_are_missed(without: str) -> None:
    """The control: some step is more than 10% off, where few bytes cross the link."""
    steps = [*measured_steps(), *measured_experts()]
    off = [abs(step.predicted_ms(**{without: 0.0}) / step.ms - 1) for step in steps]
    assert max(off) > WITHIN


def test_without_shares_of_formats_steps_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: so is a whole step of gpt-oss-20b, and the experts of every packed format."""
    monkeypatch.setattr(costmodel, "slot_read_bytes", lambda spec: spec.record_bytes)
    missed = {
        step.layer().expert.up_format.name
        for step in measured_experts()
        if abs(step.predicted_ms() / step.ms - 1) > WITHIN
    }
    assert missed == USUAL.keys() - {"plain"}
    assert any(
        abs(step.predicted_ms() / step.ms - 1) > WITHIN
        for step in measured_steps()
        if "gpt-oss" in step.case
    )


def test_distinct_experts() -> None:
    layer = t1().layers[0]
    assert distinct_experts(layer, 1) == pytest.approx(4)
    assert distinct_experts(layer, 2) == pytest.approx(16 * (1 - 0.75**2))
    assert 15.99 < distinct_experts(layer, 1000) <= 16


def test_load_time_needs_a_rate() -> None:
    model = t1()
    assert predict_load_seconds(model, RATES) == pytest.approx((48 * 98_304 + 100_000) / 2e9)
    assert predict_load_seconds(model, replace(RATES, disk_gbps=None)) is None


@pytest.mark.parametrize(
    ("share", "hit_rate"), [(0.0, 1 / 6), (0.5, 1 - 0.5 * 50 / 60), (1.0, 0.0)]
)
def test_break_even_is_where_both_take_equally_long(share: float, hit_rate: float) -> None:
    found = cpu_break_even(RATES, share)
    assert found == pytest.approx(hit_rate)
    if 0 < share < 1:
        assert (1 - found) / RATES.link_gbps == pytest.approx((1 - share) / RATES.cpu_gbps)


def test_break_even_without_a_faster_cpu_or_a_rate() -> None:
    assert cpu_break_even(replace(RATES, cpu_gbps=20.0), 0.1) == 0
    assert cpu_break_even(replace(RATES, cpu_gbps=None), 0.1) is None
