"""Requests that a plan is made fast for: how they are written, what is expected unsaid, and that
the ring follows them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_fakes import gpu, qwen3_30b

from hotset.core.config import EngineConfig
from hotset.core.errors import ConfigError
from hotset.core.geometry import AttentionLayer, ModelGeometry
from hotset.core.hit_curve import assumed_curve
from hotset.core.machine import MachineDescription
from hotset.core.plan import MemoryPlan
from hotset.core.planner import PlanRequest, make_plan
from hotset.core.speed import SpeedModel
from hotset.core.sweep import sweep_contexts
from hotset.core.units import GIB
from hotset.core.workload import DEFAULT, Workload, expected, parse_workload


def test_a_workload_is_cut_to_its_context() -> None:
    assert Workload().within(1000) == Workload(500, 500)
    assert Workload(100, 50).within(1000) == Workload(100, 50)
    assert Workload(999, 1).within(1000) == Workload(999, 1)
    assert Workload(999, 2).within(1000) == Workload(500, 2)
    assert Workload().within(2) == Workload(1, 1)


def test_kinds_of_requests_are_read() -> None:
    assert parse_workload("4096+512") == (Workload(4096, 512),)
    assert parse_workload("64+1, 32768+256") == (Workload(64, 1), Workload(32768, 256))


@pytest.mark.parametrize("text", ["", "4096", "4096+", "4096+512,", "a+b", "-1+5", "1+2+3"])
def test_what_is_no_workload_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not tokens of a prompt and an answer") as caught:
        EngineConfig(model="m", workload=text)
    assert caught.value.hint == "for example `4096+512`, or several with commas between"
    assert caught.value.option == "workload"


@pytest.mark.parametrize("text", ["0+5", "5+0", f"{2**31}+1"])
def test_tokens_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="each number must be from 1 to 2147483647"):
        EngineConfig(model="m", workload=text)


def test_a_context_that_was_asked_for_will_be_used() -> None:
    def lengths(context: int | None) -> list[int]:
        return [work.prompt_tokens for work in expected((), asked_context=context)]

    assert lengths(None) == lengths(8192) == lengths(100) == [DEFAULT.prompt_tokens]
    assert lengths(16_384) == [8192, 4096]
    assert lengths(131_072) == [65_536, 32_768, 16_384]
    said = (Workload(10, 1), Workload(20, 1))
    assert expected(said, asked_context=131_072) == (Workload(20, 1), Workload(10, 1))


def model() -> ModelGeometry:
    attention = tuple(AttentionLayer("a", i, 32, 4, 128, 128, None) for i in range(48))
    return replace(qwen3_30b(), attention=attention)


def speed() -> SpeedModel:
    rates = MachineDescription.load("h200").rates(record_bytes=9_437_184)
    return SpeedModel(model(), rates, assumed_curve())


def planned(**asked: object) -> MemoryPlan:
    request = PlanRequest(vram_bytes=20 * GIB, **asked)  # type: ignore[arg-type]
    return make_plan(model(), gpu(), request, speed=speed())


def test_the_ring_follows_the_requests() -> None:
    """32,768 tokens: their attention takes as long as most of a layer's copies, and those can be
    ahead by what the ring holds. Long answers want slots instead."""
    context = 40_960
    prompts, answers = (
        planned(context_tokens=context, workload=(Workload(20_480, answer),))
        for answer in (32, 4096)
    )
    assert prompts.staging_records >= 64 > answers.staging_records
    assert prompts.num_slots < answers.num_slots
    assert prompts.speed is not None and answers.speed is not None
    assert prompts.speed.prompt.total_ms < answers.speed.prompt.total_ms
    assert prompts.speed.tokens_per_second < answers.speed.tokens_per_second
    # Nothing that could change a bit does.
    assert prompts.prefill_chunk == answers.prefill_chunk
    (ring,) = [choice for choice in prompts.choices if choice.name == "staging records"]
    assert ring.reason.startswith("fastest for 20480 tokens of prompt and 32 of answer: ")


def test_several_kinds_count_alike() -> None:
    both = (Workload(20_480, 32), Workload(4096, 32))
    plan = planned(context_tokens=40_960, workload=both)
    (ring,) = [choice for choice in plan.choices if choice.name == "staging records"]
    assert "for 20480 or 4096 tokens of prompt and 32 of answer" in ring.reason
    assert ring.reason.endswith(" s predicted for the first")


def test_a_sweep_compares_contexts_with_the_same_requests() -> None:
    request = PlanRequest(vram_bytes=12 * GIB)
    plans = sweep_contexts(model(), gpu(), request, speed=speed())
    works = [plan.speed.workload for plan in plans if plan.speed is not None]
    assert len(works) > 3
    assert works == [DEFAULT.within(plan.context_tokens) for plan in plans[: len(works)]]
