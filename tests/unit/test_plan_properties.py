"""What holds for every model, machine and request: budgets kept, sizes honoured, monotone."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_fakes import cpu, geometry, gpu

from hotset.core.geometry import AttentionLayer, ModelGeometry
from hotset.core.hardware import Machine
from hotset.core.planner import PlanRequest, make_plan
from hotset.core.units import GIB, MIB

few = settings(max_examples=60, deadline=None)


@st.composite
def models(draw: st.DrawFn) -> ModelGeometry:
    num_layers = draw(st.integers(1, 5))
    return geometry(
        hidden=draw(st.sampled_from([64, 96, 256])),
        num_layers=num_layers,
        num_experts=draw(st.sampled_from([4, 7, 32])),
        top_k=draw(st.integers(1, 4)),
        intermediate=draw(st.sampled_from([32, 80, 512])),
        dense_layers=draw(st.integers(0, num_layers - 1)),
        resident_bytes=draw(st.integers(0, 30 * MIB)),
        kv_bytes_per_token=draw(st.sampled_from([0, 64, 5000])),
        kv_fixed_bytes=draw(st.sampled_from([0, 70_000])),
        max_context=draw(st.sampled_from([0, 100, 300, 4096, 40_960])),
        activation_bytes_per_token=draw(st.sampled_from([0, 999, 20_000])),
        activation_bytes_per_pair=draw(st.sampled_from([0, 3, 200])),
    )


machines = st.one_of(
    st.builds(cpu, available=st.integers(300 * MIB, 4 * GIB)),
    st.builds(gpu, free=st.integers(300 * MIB, 4 * GIB), available=st.just(8 * GIB)),
)
requests = st.builds(
    PlanRequest,
    vram_bytes=st.none() | st.integers(0, 2 * GIB),
    ram_bytes=st.none() | st.integers(1, 4 * GIB),
    context_tokens=st.none() | st.integers(2, 5000),
    prefill_chunk=st.none() | st.integers(1, 3000),
)


@few
@given(models(), machines, requests)
def test_a_plan_that_fits_keeps_its_budgets(
    model: ModelGeometry, machine: Machine, request: PlanRequest
) -> None:
    plan = make_plan(model, machine, request)
    if not plan.fits:
        assert all(problem.need > problem.have for problem in plan.problems)
        return
    if plan.device.budget_bytes is not None:
        assert plan.device.total_bytes <= plan.device.budget_bytes
    assert plan.host.budget_bytes is not None
    assert plan.host.total_bytes <= plan.host.budget_bytes
    assert plan.host.budget_bytes <= machine.host.available_bytes
    assert 1 <= plan.prefill_chunk <= plan.context_tokens
    assert model.max_context == 0 or plan.context_tokens <= model.max_context
    assert plan.num_slots == 0 or machine.device == "cuda" or request.vram_bytes is not None


@few
@given(models(), machines, requests, st.integers(2, 9000), st.integers(1, 3))
def test_a_set_cache_is_what_is_planned(
    model: ModelGeometry, machine: Machine, request: PlanRequest, kv_tokens: int, rows: int
) -> None:
    """A context that is not set keeps to it, however short it is."""
    kv_tokens = max(kv_tokens, request.context_tokens or 0)
    model = replace(model, attention=(AttentionLayer("a", 0, 4, 4, 16, 16, None),))
    plan = make_plan(model, machine, replace(request, kv_tokens=kv_tokens, max_batch=rows))
    assert plan.kv_tokens == kv_tokens and plan.context_tokens <= kv_tokens
    longest = max(model.max_context, request.context_tokens or 0)
    assert model.max_context == 0 or plan.context_tokens <= longest


@few
@given(models(), machines, requests)
def test_what_was_set_is_what_is_planned(
    model: ModelGeometry, machine: Machine, request: PlanRequest
) -> None:
    plan = make_plan(model, machine, request)
    asked = {
        "vram": request.vram_bytes,
        "ram": request.ram_bytes,
        "context": request.context_tokens,
        "prefill chunk": request.prefill_chunk,
    }
    for choice in plan.choices:
        assert choice.requested == asked.get(choice.name)
        assert choice.requested in (None, choice.effective)
    if request.vram_bytes is not None:
        assert plan.device.budget_bytes == request.vram_bytes
    if request.context_tokens is not None:
        assert plan.context_tokens == request.context_tokens
    if request.prefill_chunk is not None:
        assert plan.prefill_chunk == request.prefill_chunk


@few
@given(models(), machines, requests, st.integers(1, 2 * GIB), st.integers(0, 64 * MIB))
def test_more_vram_never_gives_fewer_slots(
    model: ModelGeometry, machine: Machine, request: PlanRequest, vram: int, more: int
) -> None:
    less_plan = make_plan(model, machine, replace(request, vram_bytes=vram))
    more_plan = make_plan(model, machine, replace(request, vram_bytes=vram + more))
    pairs = zip(less_plan.slots_per_layer, more_plan.slots_per_layer, strict=True)
    assert all(less <= more for less, more in pairs)


@few
@given(models(), machines, requests)
def test_slots_are_even_and_no_more_than_experts(
    model: ModelGeometry, machine: Machine, request: PlanRequest
) -> None:
    plan = make_plan(model, machine, request)
    assert max(plan.slots_per_layer) - min(plan.slots_per_layer) <= 1
    assert max(plan.slots_per_layer) <= model.layers[0].num_experts
    assert sum(pool.num_slots for pool in plan.pools) == plan.num_slots


@few
@given(models(), machines, requests)
def test_the_least_vram_that_is_named_is_the_least(
    model: ModelGeometry, machine: Machine, request: PlanRequest
) -> None:
    plan = make_plan(model, machine, replace(request, vram_bytes=0))
    need = next(problem.need for problem in plan.problems if problem.flag == "--vram")
    flags = {problem.flag for problem in plan.problems} - {"--vram"}
    # Of a length that no budget is asked for, the hint is the length that fits.
    assume(not flags & {"--context", "--prefill-chunk"})
    for vram, short in ((need, False), (need - 1, True)):
        again = make_plan(model, machine, replace(request, vram_bytes=vram))
        missing = any("the least that works" in problem.message for problem in again.problems)
        assert missing is short
        assert flags <= {problem.flag for problem in again.problems}
