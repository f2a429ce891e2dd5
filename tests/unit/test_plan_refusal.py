"""Plans that cannot be carried out: the exact words, and values that then do work."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from plan_fakes import cpu, gpu, qwen3_30b, t0, t1

from hotset.core.errors import CapacityError
from hotset.core.planner import PlanRequest, make_plan
from hotset.core.units import GIB, MIB, parse_bytes


def suggested(text: str, flag: str) -> str:
    """The value that a hint gives for a flag."""
    found = re.search(rf"`{flag} (\w+)`", text)
    assert found, f"no value for {flag} in: {text}"
    return found.group(1)


def test_budget_below_the_dense_weights() -> None:
    """MB-05: exit code 2, the sum item by item, the least that works, flags to change."""
    request = PlanRequest(vram_bytes=90_000, context_tokens=64, prefill_chunk=16)
    with pytest.raises(CapacityError) as caught:
        make_plan(t1(), cpu(), request).require_fit()
    assert caught.value.exit_code == 2
    assert caught.value.message == (
        "`--vram` is 87.89 KiB, the least that works is 610.78 KiB with 0 slots: "
        "resident weights 97.66 KiB + expert tables 768 B + KV cache 48.00 KiB + "
        "KV copies 16.00 KiB + activations 26.38 KiB + attention workspace 4.00 KiB + "
        "expert workspace 418.00 KiB"
    )
    assert caught.value.hint == "use `--vram 1MiB`"


def test_budget_of_dense_weights_and_one_expert() -> None:
    """MB-05: not rounded up to a floor of its own, refused with the number that works."""
    model = t1()
    budget = model.resident_bytes + 98_304
    request = PlanRequest(vram_bytes=budget, context_tokens=64)
    (problem,) = make_plan(model, cpu(), request).problems
    assert (problem.flag, problem.have) == ("--vram", budget)
    works = replace(request, vram_bytes=problem.need)
    assert make_plan(model, cpu(), works).require_fit().num_slots == 0
    assert not make_plan(model, cpu(), replace(works, vram_bytes=problem.need - 1)).fits


def test_sizes_that_read_the_same_are_given_in_bytes() -> None:
    request = PlanRequest(vram_bytes=1, context_tokens=64)
    need = make_plan(t1(), cpu(), request).problems[0].need
    (problem,) = make_plan(t1(), cpu(), replace(request, vram_bytes=need - 1)).problems
    assert f"`--vram` is {need - 1} bytes, the least that works is {need} bytes" in problem.message


@pytest.mark.parametrize("machine", [cpu(), gpu()], ids=["cpu", "cuda"])
def test_every_suggested_value_works(machine) -> None:
    """Each of three flags alone mends a plan that lacks 1 MiB; one token more does not."""
    request = PlanRequest(vram_bytes=1, context_tokens=8192, prefill_chunk=512)
    least = make_plan(qwen3_30b(), machine, request).problems[0].need
    request = replace(request, vram_bytes=least - MIB)
    (problem,) = make_plan(qwen3_30b(), machine, request).problems

    def fits(**changes: int) -> bool:
        return make_plan(qwen3_30b(), machine, replace(request, **changes)).fits

    assert fits(vram_bytes=parse_bytes(suggested(problem.hint, "--vram")))
    context = int(suggested(problem.hint, "--context"))
    assert fits(context_tokens=context)
    assert not fits(context_tokens=context + 1)
    chunk = int(suggested(problem.hint, "--prefill-chunk"))
    assert fits(prefill_chunk=chunk)
    assert not fits(prefill_chunk=chunk + 1)


def test_a_shorter_context_takes_a_longer_chunk_with_it() -> None:
    request = PlanRequest(vram_bytes=5 * GIB, context_tokens=20_480, prefill_chunk=8192)
    (problem,) = make_plan(qwen3_30b(), gpu(), request).problems
    found = re.search(r"`--context (\d+) --prefill-chunk (\d+)`", problem.hint)
    assert found
    context, chunk = map(int, found.groups())
    assert context == chunk
    works = replace(request, context_tokens=context, prefill_chunk=chunk)
    assert make_plan(qwen3_30b(), gpu(), works).fits


def test_card_that_is_too_small_for_any_setting() -> None:
    with pytest.raises(CapacityError) as caught:
        make_plan(qwen3_30b(), gpu(free=2 * GIB), PlanRequest()).require_fit()
    assert caught.value.message.startswith(
        "`a GPU` has 2.53 GiB to give, the least that works is 3.90 GiB with 0 slots: "
        "resident weights 2.87 GiB + "
    )
    assert caught.value.hint == "a GPU with at least 3.90 GiB of free memory is needed"


def test_more_vram_than_is_free() -> None:
    with pytest.raises(CapacityError) as caught:
        make_plan(t0(), gpu(free=8 * GIB), PlanRequest(vram_bytes=10 * GIB)).require_fit()
    assert caught.value.message == "`--vram` is 10.00 GiB, `a GPU` has 8.53 GiB to give"
    assert caught.value.hint == "set `--vram 8736MiB` or less, or leave it out"


def test_experts_beyond_the_host_memory() -> None:
    """HR-15: the shortfall in numbers, before anything is read."""
    model = replace(t0(), layers=t0().layers * 8192)
    assert model.expert_bytes == 1536 * MIB
    machine = gpu(free=GIB, available=GIB)
    with pytest.raises(CapacityError) as caught:
        make_plan(model, machine, PlanRequest()).require_fit()
    # Of the device's memory 702 MiB are slots, which may be an expert's only place.
    assert caught.value.message == (
        "1.00 GiB of host memory is available, 1.32 GiB is needed: "
        "expert arena 834.40 MiB + loading 193.66 KiB + host headroom 512.00 MiB"
    )
    assert caught.value.hint == (
        "every expert needs a place in host memory or a slot of its own: a machine or container "
        "with at least 1.32 GiB available is needed, and with 2.00 GiB all slots follow the text"
    )
    enough = replace(machine.host, available_bytes=int(1.32 * GIB))
    assert make_plan(model, replace(machine, host=enough), PlanRequest()).fits


def test_a_context_that_leaves_enough_slots_is_named() -> None:
    """40 GiB hold all but 16.5 GiB of the experts, and those fit the slots of a short context."""
    machine = gpu(available=40 * GIB)
    (problem,) = make_plan(qwen3_30b(), machine, PlanRequest(context_tokens=40_960)).problems
    assert problem.hint == "use `--context 8192`"
    assert make_plan(qwen3_30b(), machine, PlanRequest(context_tokens=8192)).fits


def test_container_limit_is_named() -> None:
    """HR-06: the planner's side of it."""
    plan = make_plan(qwen3_30b(), cpu(available=GIB, container=2 * GIB), PlanRequest())
    assert plan.problems[0].message.startswith(
        "1.00 GiB of host memory is available (the container's limit is 2.00 GiB), "
    )


def test_explicit_ram_is_kept_or_refused() -> None:
    low = PlanRequest(ram_bytes=30 * GIB)
    plan = make_plan(qwen3_30b(), gpu(), low)
    assert plan.host.budget_bytes == 30 * GIB
    assert plan.problems[0].message.startswith("`--ram` is 30.00 GiB, 41.51 GiB is needed: ")
    assert plan.problems[0].hint == "use `--ram 42502MiB`"
    assert make_plan(qwen3_30b(), gpu(), PlanRequest(ram_bytes=42_502 * MIB)).fits
    assert not make_plan(qwen3_30b(), gpu(), PlanRequest(ram_bytes=42_501 * MIB)).fits

    high = make_plan(qwen3_30b(), gpu(available=100 * GIB), PlanRequest(ram_bytes=101 * GIB))
    assert high.problems[0].message == "`--ram` is 101.00 GiB, 100.00 GiB is available"
    assert high.problems[0].hint == "set `--ram 102400MiB` or less, or leave it out"


def test_context_beyond_the_model() -> None:
    (problem,) = make_plan(t0(), cpu(), PlanRequest(context_tokens=9000)).problems
    assert problem.message == "`--context` is 9000 tokens, the model was made for 8192"
    assert problem.hint == "set `--context 8192` or less, or leave it out"


def test_chunk_beyond_the_context() -> None:
    request = PlanRequest(context_tokens=512, prefill_chunk=1024)
    (problem,) = make_plan(t0(), cpu(), request).problems
    assert problem.message == "`--prefill-chunk` is 1024 tokens, the context has 512"
    assert problem.hint == "set `--prefill-chunk 512` or less, or leave it out"


@pytest.mark.parametrize("machine", [cpu(), gpu()], ids=["cpu", "cuda"])
@pytest.mark.parametrize("vram_bytes", [None, 6 * GIB], ids=["auto", "6GiB"])
@pytest.mark.parametrize(
    ("context", "chunk"), [(10**12, None), (None, 10**12), (10**12, 10**13), (10**12, 8192)]
)
def test_a_length_out_of_all_measure_is_one_problem(
    machine, vram_bytes: int | None, context: int | None, chunk: int | None
) -> None:
    """Not one more for the memory it would take, and what the hint says works."""
    request = PlanRequest(context_tokens=context, prefill_chunk=chunk, vram_bytes=vram_bytes)
    problems = make_plan(qwen3_30b(), machine, request).problems
    asked = {"--context": context, "--prefill-chunk": chunk}
    too_long = [flag for flag, value in asked.items() if (value or 0) > 10**11]
    assert [problem.flag for problem in problems] == too_long
    hints = " ".join(problem.hint for problem in problems)
    changes = {
        name: int(suggested(hints, flag))
        for flag, name in (("--context", "context_tokens"), ("--prefill-chunk", "prefill_chunk"))
        if flag in hints
    }
    assert make_plan(qwen3_30b(), machine, replace(request, **changes)).fits
    left_out = dict.fromkeys(changes)
    assert ("leave it out" in problems[0].hint) <= make_plan(
        qwen3_30b(), machine, replace(request, **left_out)
    ).fits


def test_float32_is_offered_the_narrower_dtype() -> None:
    model = replace(qwen3_30b(), dtype="float32")
    (problem,) = make_plan(model, gpu(available=20 * GIB), PlanRequest()).problems
    assert problem.hint == "use `--dtype bfloat16`, which halves the weights"


def test_several_problems_are_all_said() -> None:
    plan = make_plan(qwen3_30b(), gpu(free=2 * GIB, available=GIB), PlanRequest())
    assert [problem.flag for problem in plan.problems] == ["--vram", "--ram"]
    with pytest.raises(CapacityError, match=r"has 2\.53 GiB to give.*; 1\.00 GiB of host memory"):
        plan.require_fit()
