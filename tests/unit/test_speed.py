"""Predicted speed in plans: chosen by it, printed with its assumptions, swept over contexts."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_fakes import gpu, qwen3_30b

from hotset.core.costmodel import Rates
from hotset.core.errors import ConfigError
from hotset.core.geometry import AttentionLayer, ModelGeometry
from hotset.core.hit_curve import HitCurve, assumed_curve
from hotset.core.machine import MachineDescription, shipped_machines
from hotset.core.planner import PlanRequest, make_plan
from hotset.core.speed import RING_TOKENS, SpeedModel
from hotset.core.sweep import sweep_contexts, swept_contexts
from hotset.core.units import GIB
from hotset.core.workload import Workload

RATES = Rates(50.0, 55.0, 4000.0, gemm_tflops=200.0, cpu_gbps=60.0, disk_gbps=2.0, layer_us=60.0)


def model_of(rates: Rates = RATES, curve: HitCurve | None = None) -> SpeedModel:
    return SpeedModel(qwen3_30b(), rates, curve or assumed_curve())


def attending() -> ModelGeometry:
    layers = tuple(AttentionLayer("a", index, 32, 4, 128, 128, None) for index in range(48))
    return replace(qwen3_30b(), attention=layers)


def predict(model: SpeedModel, slots: int, context: int = 8192, chunk: int = 2048):
    return model.predict(
        slots_per_layer=[slots] * 48,
        context_tokens=context,
        prefill_chunk=chunk,
        staging_records=0 if slots == 128 else 128,
        workload=Workload(),
    )


def test_the_runtime_streams_from_as_many_tokens() -> None:
    from hotset.runtime.moe import MATCH_TOKENS

    assert MATCH_TOKENS + 1 == RING_TOKENS


def test_more_slots_are_faster_in_every_figure() -> None:
    speeds = [predict(model_of(), slots) for slots in (0, 16, 64, 128)]
    rising = [(s.tokens_per_second, s.hit_rate, -s.first_token_seconds) for s in speeds]
    assert rising == sorted(rising)
    assert speeds[0].hit_rate == 0
    assert speeds[-1].hit_rate == 1
    assert speeds[-1].step.experts_ms == pytest.approx(48 * 8 * 9_437_184 / 4000 / 1e6)


def test_seconds_are_the_prompt_and_the_answer() -> None:
    speed = predict(model_of(), 32)
    assert speed.workload == Workload(4096, 512)
    step_seconds = 512 * speed.step.total_ms / 1e3
    assert speed.seconds == pytest.approx(speed.first_token_seconds + step_seconds)
    assert speed.tokens_per_second == pytest.approx(1e3 / speed.step.total_ms)


def test_rows_share_a_step() -> None:
    one, four = (predict(model_of(curve=assumed_curve(rows)), 32) for rows in (1, 4))
    assert one.step.total_ms < four.step.total_ms
    assert four.num_rows == 4
    assert four.tokens_per_second == pytest.approx(4e3 / four.step.total_ms)


def test_what_was_not_measured_is_said() -> None:
    bare = Rates(50.0, 55.0, 4000.0)
    said = " ".join(predict(model_of(bare), 32).assumptions)
    for part in ("hit rate", "products of a prompt", "attention of a prompt", "beyond their bytes"):
        assert part in said
    assert "as fast as one of large" in " ".join(predict(model_of(), 32).assumptions)
    grouped = replace(RATES, expert_tflops=50.0)
    assert "as fast as one of large" not in " ".join(predict(model_of(grouped), 32).assumptions)
    # With a slot for each, 4,096 tokens are bound by their experts' operations, beside their sums.
    slower = replace(RATES, expert_tflops=25.0)
    slowest, slow, fast = (
        predict(model_of(rates), 128).prompt.experts_ms for rates in (slower, grouped, RATES)
    )
    more = (1 / 25 - 1 / 50) / (1 / 50 - 1 / RATES.gemm_tflops)
    assert slowest - slow == pytest.approx(more * (slow - fast))
    assert "attention of a prompt is as fast" in " ".join(
        SpeedModel(attending(), RATES, assumed_curve()).assumptions
    )
    curve = HitCurve((0.0, 1.0), (0.0, 1.0), "replayed")
    assert "hit rate" not in " ".join(predict(model_of(curve=curve), 32).assumptions)


@pytest.mark.parametrize("name", shipped_machines())
def test_shipped_machines_predict(name: str) -> None:
    description = MachineDescription.load(name)
    model = SpeedModel.of_machine(qwen3_30b(), description, assumed_curve())
    plan = make_plan(qwen3_30b(), description.machine, PlanRequest(), speed=model)
    assert plan.speed is not None
    assert plan.speed.tokens_per_second > 1
    assert set(description.caveats()) <= set(plan.speed.assumptions)
    assert json.loads(json.dumps(plan.to_dict()))["speed"]["step"]["total_ms"] > 0


def test_a_machine_without_a_rate_cannot_predict() -> None:
    description = MachineDescription.load("h200")
    bare = replace(description, figures={})
    with pytest.raises(ConfigError, match="has no figure `link_zero_copy`"):
        SpeedModel.of_machine(qwen3_30b(), bare, assumed_curve())


vram = st.integers(5, 40).map(lambda gib: gib * GIB)
contexts = st.none() | st.integers(1024, 40_960)


@settings(max_examples=25, deadline=None)
@given(vram, contexts, st.sampled_from([0.05, 0.5, 4.0, 1000.0]))
def test_a_plan_by_prediction_fits_and_is_no_slower(
    vram_bytes: int, context: int | None, link: float
) -> None:
    """Whatever the link: a slow one asks for long chunks, a fast one for slots."""
    request = PlanRequest(vram_bytes=vram_bytes, context_tokens=context, workload=(Workload(),))
    model = model_of(replace(RATES, link_gbps=link, copy_gbps=link))
    by_rules = make_plan(qwen3_30b(), gpu(free=48 * GIB), request)
    plan = make_plan(qwen3_30b(), gpu(free=48 * GIB), request, speed=model)
    assert plan.fits == by_rules.fits
    if not plan.fits:
        assert plan.speed is None
        return
    assert plan.device.total_bytes <= vram_bytes
    assert plan.context_tokens == by_rules.context_tokens
    assert plan.speed is not None
    rules = model.predict(
        slots_per_layer=by_rules.slots_per_layer,
        context_tokens=by_rules.context_tokens,
        prefill_chunk=by_rules.prefill_chunk,
        staging_records=by_rules.staging_records,
        workload=Workload(),
    )
    assert plan.speed.seconds <= rules.seconds


def test_the_reason_of_the_chunk_says_what_it_is_worth() -> None:
    request = PlanRequest(vram_bytes=16 * GIB)
    plan = make_plan(qwen3_30b(), gpu(), request, speed=model_of())
    (chunk,) = [choice for choice in plan.choices if choice.name == "prefill chunk"]
    assert plan.prefill_chunk == chunk.effective == 4096
    assert chunk.reason.startswith("fastest for 4096 tokens of prompt and 512 of answer: ")


@pytest.mark.parametrize("link", [0.05, 4.0, 1000.0])
def test_no_rate_changes_a_chunk_that_runs_beside_others(link: float) -> None:
    """It changes low bits of an answer; the ring changes none, and is as fast as can be."""
    rates = replace(RATES, link_gbps=link, copy_gbps=link)
    speed = SpeedModel(attending(), rates, assumed_curve())
    request = PlanRequest(vram_bytes=16 * GIB)
    plan = make_plan(attending(), gpu(), request, speed=speed)
    by_rules = make_plan(attending(), gpu(), request)
    assert plan.prefill_chunk == by_rules.prefill_chunk
    assert plan.context_tokens == by_rules.context_tokens
    assert 0 < plan.staging_records < by_rules.staging_records
    assert plan.num_slots > by_rules.num_slots
    (ring,) = [choice for choice in plan.choices if choice.name == "staging records"]
    assert ring.reason.startswith("fastest for 4096 tokens of prompt and 512 of answer: ")


def test_a_ring_that_is_not_wanted_is_not_chosen() -> None:
    request = PlanRequest(vram_bytes=16 * GIB, staging="in-place")
    assert make_plan(qwen3_30b(), gpu(), request, speed=model_of()).staging_records == 0


def test_what_the_context_costs_is_said() -> None:
    """Against the shortest that the workload needs; nothing where it is a percent at most."""
    speed = SpeedModel(attending(), RATES, assumed_curve())

    def reason(**asked: int) -> str:
        plan = make_plan(attending(), gpu(free=200 * GIB), PlanRequest(**asked), speed=speed)
        return next(choice.reason for choice in plan.choices if choice.name == "context")

    assert re.search(r"; with 8192 decoding is \d+% faster$", reason(vram_bytes=16 * GIB))
    assert reason(vram_bytes=100 * GIB) == "the model's longest"
    assert reason(vram_bytes=16 * GIB, context_tokens=30_000) == "as set"


def test_a_chunk_that_was_set_is_kept() -> None:
    request = PlanRequest(vram_bytes=16 * GIB, prefill_chunk=300)
    plan = make_plan(qwen3_30b(), gpu(), request, speed=model_of())
    assert plan.prefill_chunk == 300
    assert plan.speed is not None
    assert plan.speed.prompt.num_passes == 14  # 4,096 tokens


def test_a_sweep_trades_slots_for_context() -> None:
    plans = sweep_contexts(
        qwen3_30b(), gpu(), PlanRequest(vram_bytes=8 * GIB, context_tokens=77), speed=model_of()
    )
    assert [plan.context_tokens for plan in plans] == [2048, 4096, 8192, 16384, 32768, 40960]
    slots = [plan.num_slots for plan in plans if plan.fits]
    assert slots == sorted(slots, reverse=True)
    assert slots[0] > slots[-1]


def test_swept_contexts_end_with_the_longest() -> None:
    assert swept_contexts(2048) == [2048]
    assert swept_contexts(1000) == [1000]
    assert swept_contexts(5000) == [2048, 4096, 5000]
