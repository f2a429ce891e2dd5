"""The cost model: formulas by hand, and predictions against every decode step that was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from plan_fakes import qwen3_30b, t1
from repository import ROOT

from hotset.core.costmodel import (
    Rates,
    attention_flops,
    cpu_break_even,
    decode_step,
    distinct_experts,
    expert_flops,
    predict_load_seconds,
    predict_prompt,
    predict_step,
    sum_of_contexts,
)
from hotset.core.geometry import AttentionLayer
from hotset.core.machine import MachineDescription

RATES = Rates(50.0, 55.0, 4000.0, gemm_tflops=200.0, cpu_gbps=60.0, disk_gbps=2.0, layer_us=60.0)

# Prediction within 10% of the measurement is the goal that the model of the machine is held to.
WITHIN = 0.10


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


def test_the_mean_of_the_longer_read_is_no_less_than_the_longer_of_the_means() -> None:
    model, hit_rates, used = t1(), [0.3, 0.9, 0.99], [4.0, 4.0, 4.0]
    expected = predict_step(model, RATES, hit_rates=hit_rates, used=used, context_tokens=0)
    misses = [4 * (1 - rate) for rate in hit_rates]
    light = decode_step(
        model, RATES, hits=[4 * r for r in hit_rates], misses=misses, context_tokens=0
    )
    both = light.experts_ms + sum(4 * rate for rate in hit_rates) * 98_304 / 4000 / 1e6
    assert light.experts_ms <= expected.experts_ms <= both


def measured_steps() -> list[tuple[str, float, float]]:
    """Case, ms and hit rate of the whole decode steps in the benchmarks' rows."""
    rows = map(json.loads, (ROOT / "benchmarks/results.jsonl").read_text().splitlines())
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["bench"] == "decode" and "H200" in row["machine"]:
            found.setdefault(row["case"], {})[row["figure"]] = row["p50"]
    return [
        (case, figures["whole step"], figures["hit rate"])
        for case, figures in found.items()
        if case.startswith("qwen3-30b-a3b, ")
        and case.endswith(" 1024 context")
        and "whole step" in figures
    ]


@pytest.mark.parametrize(("case", "measured_ms", "hit_rate"), measured_steps())
def test_measured_steps_are_predicted(case: str, measured_ms: float, hit_rate: float) -> None:
    """The layer time of the machine file comes from two other rows: a step without experts, and
    the expert kernels alone. Attention reads 1,024 tokens; the head and all else 2.28 GiB."""
    model = replace(qwen3_30b(), resident_read_bytes=2_461_000_000)
    rates = MachineDescription.load("h200").rates(record_bytes=9_437_184)
    args = {"hit_rates": [hit_rate] * 48, "used": [8.0] * 48, "context_tokens": 1024}
    assert predict_step(model, rates, **args).total_ms == pytest.approx(measured_ms, rel=WITHIN)


def test_without_the_layer_time_measured_steps_are_missed() -> None:
    """The control: the speed of light alone is more than 10% off where few bytes cross the link."""
    model = replace(qwen3_30b(), resident_read_bytes=2_461_000_000)
    rates = replace(MachineDescription.load("h200").rates(record_bytes=9_437_184), layer_us=0.0)
    off = [
        abs(
            predict_step(
                model, rates, hit_rates=[hit_rate] * 48, used=[8.0] * 48, context_tokens=1024
            ).total_ms
            / ms
            - 1
        )
        for _, ms, hit_rate in measured_steps()
    ]
    assert len(off) >= 8
    assert max(off) > WITHIN


def test_a_prompt_streams_cold_experts_once_for_each_forward() -> None:
    args = {"num_tokens": 1000, "resident_share": [0.25] * 3, "ring_tokens": 65}
    whole = predict_prompt(t1(), RATES, chunk_tokens=1000, **args)
    chunks = predict_prompt(t1(), RATES, chunk_tokens=400, **args)
    assert (whole.num_passes, chunks.num_passes) == (1, 3)
    assert whole.stream_ms == pytest.approx(0.75 * 48 * 98_304 / 55 / 1e6)
    assert chunks.stream_ms == pytest.approx(3 * whole.stream_ms)


def test_a_short_prompt_reads_in_place() -> None:
    args = {"chunk_tokens": 64, "resident_share": [0.0] * 3, "ring_tokens": 65}
    short = predict_prompt(t1(), RATES, num_tokens=64, **args)
    experts = distinct_experts(t1().layers[0], 64)
    assert short.stream_ms == pytest.approx(3 * experts * 98_304 / 50 / 1e6)


def test_a_long_prompt_is_bound_by_its_products() -> None:
    args = {"resident_share": [0.5] * 3, "ring_tokens": 65}
    cost = predict_prompt(t1(), RATES, num_tokens=8192, chunk_tokens=8192, **args)
    flops = 3 * 8192 * 4 * 6 * 128 * 128
    assert cost.experts_ms == pytest.approx(flops / 200e9)
    assert cost.experts_ms > cost.stream_ms


def test_operations_by_hand() -> None:
    assert expert_flops(t1().layers[0]) == 2 * 3 * 128 * 128
    full = AttentionLayer("a", 0, 8, 2, 64, 32, None)
    near = replace(full, window=4)
    model = replace(t1(), attention=(full, near))
    pairs = (5 + 6 + 7) + (4 + 4 + 4)  # tokens 4, 5, 6
    assert attention_flops(model, 4, 7) == 2 * 8 * (64 + 32) * pairs


@pytest.mark.parametrize("window", [None, 1, 3, 8, 50])
def test_pairs_of_tokens_are_counted(window: int | None) -> None:
    for num in (0, 1, 7, 8, 9, 30):
        counted = sum(min(token + 1, window or num) for token in range(num))
        assert sum_of_contexts(num, window) == counted


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
