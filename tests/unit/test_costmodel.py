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

from hotset.core.costmodel import (
    Rates,
    cpu_break_even,
    decode_step,
    distinct_experts,
    predict_load_seconds,
    predict_step,
)
from hotset.core.machine import MachineDescription

RATES = Rates(50.0, 55.0, 4000.0, gemm_tflops=200.0, cpu_gbps=60.0, disk_gbps=2.0, layer_us=60.0)

# Prediction within 10% of the measurement is the goal that the model of the machine is held to.
WITHIN = 0.10
# The commit whose rows the figures of the machine file are from.
MEASURED_AT = "c066fbe"
# A step reads bytes: INT4 records are 2,433,024 and lossless ones 7,122,944, which are those of so
# many rows in BF16.
ROWS_AS_LONG = {" int4,": 198, " lossless,": 580}
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


@dataclass(frozen=True)
class MeasuredStep:
    """A whole decode step of one token at 1,024 tokens, Qwen3-30B-A3B shape on an H200."""

    case: str
    num_layers: int
    ms: float
    hit_rate: float
    layer_us: float  # from the step without experts of the same run

    def predicted_ms(self, **changed: float) -> float:
        """With the figures of the machine file and that layer time, or others."""
        whole = qwen3_30b()
        layers = whole.layers[: self.num_layers]
        for name, inter in ROWS_AS_LONG.items():
            if name in self.case:
                layers = tuple(replace(layer, expert=expert_of(2048, inter)) for layer in layers)
        # What is no expert, from the speed of light of the steps without experts at both sizes.
        read = 622_000_000 + 38_300_000 * self.num_layers
        model = replace(
            whole,
            layers=layers,
            num_layers=self.num_layers,
            kv_bytes_per_token=2048 * self.num_layers,
            resident_read_bytes=read,
        )
        record_bytes = layers[0].expert.record_bytes
        rates = MachineDescription.load("h200").rates(record_bytes=record_bytes)
        return predict_step(
            model,
            replace(rates, **{"layer_us": self.layer_us, **changed}),
            hit_rates=[self.hit_rate] * self.num_layers,
            used=[8.0] * self.num_layers,
            context_tokens=1024,
        ).total_ms


def measured_steps() -> list[MeasuredStep]:
    """All of that commit and shape; the layer time is the one of the same run."""
    lines = (ROOT / "benchmarks/results.jsonl").read_text().splitlines()
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, lines):
        own = row["bench"] == "decode" and row["commit"] == MEASURED_AT
        if own and row["case"].startswith("qwen3-30b-a3b"):
            runs.setdefault(row["command"], []).append(row)
    return [step for command, rows in runs.items() for step in steps_of(command, rows)]


def steps_of(command: str, rows: list[dict[str, Any]]) -> Iterator[MeasuredStep]:
    """Steps of one token of hotset itself, not of what it is compared with."""
    cut = re.search(r"--layers (\d+)", command)
    num_layers = int(cut[1]) if cut else 48
    (bare,) = (r for r in rows if r["figure"] == BARE and " 1024 tokens" in r["case"])
    layer_us = (bare["p50"] - bare["sol"]) / num_layers * 1e3
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["figure"]] = row["p50"]
    for case, figures in found.items():
        if {"whole step", "hit rate"} <= figures.keys():
            step_ms, hit_rate = figures["whole step"], figures["hit rate"]
            yield MeasuredStep(case, num_layers, step_ms, hit_rate, layer_us)


@pytest.mark.parametrize(
    "step", measured_steps(), ids=lambda step: f"{step.case}-{step.num_layers}"
)
def test_measured_steps_are_predicted(step: MeasuredStep) -> None:
    """From the layer time of the run itself; the experts' is one number for all."""
    assert step.predicted_ms() == pytest.approx(step.ms, rel=WITHIN)


@pytest.mark.parametrize("without", ["layer_us", "experts_us"])
def test_without_either_time_measured_steps_are_missed(without: str) -> None:
    """The control: some step is more than 10% off, where few bytes cross the link."""
    off = [abs(step.predicted_ms(**{without: 0.0}) / step.ms - 1) for step in measured_steps()]
    assert len(off) >= 20
    assert max(off) > WITHIN


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
