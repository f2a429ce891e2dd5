"""What a plan charges and chooses; the cases are those of public bug reports (MB-*, UX-01)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_fakes import cpu, expert_of, geometry, gpu, qwen3_30b, t0, t1, t4

from hotset.core.charges import SAMPLING_BYTES_PER_LOGIT
from hotset.core.geometry import AttentionLayer, ModelGeometry, MoELayer
from hotset.core.hardware import Machine
from hotset.core.plan import Choice, MemoryPlan
from hotset.core.planner import PlanRequest, Workspace, make_plan
from hotset.core.units import GIB, MIB

SMALL = PlanRequest(vram_bytes=1, context_tokens=512, prefill_chunk=64)


def least_vram(plan: MemoryPlan) -> int:
    """What the plan says its smallest `--vram` is."""
    return next(problem.need for problem in plan.problems if problem.flag == "--vram")


def choice(plan: MemoryPlan, name: str) -> Choice:
    return next(choice for choice in plan.choices if choice.name == name)


def test_every_line_of_a_gpu_plan() -> None:
    model = t1()
    plan = make_plan(model, gpu(), PlanRequest(context_tokens=512, prefill_chunk=64))
    assert [line.name for line in plan.device.lines] == [
        "resident weights",
        "slots",
        "expert tables",
        "staging ring",
        "KV cache",
        "KV copies",
        "activations",
        "attention workspace",
        "expert workspace",
        "CUDA context",
        "headroom",
    ]
    device = plan.device
    assert device["resident weights"] == model.resident_bytes
    assert device["slots"] == model.expert_bytes
    assert device["KV cache"] == 512 * model.kv_bytes_per_token
    assert device["KV copies"] == 512 * model.kv_bytes_per_token // 3
    outside = device["activations"] + device["attention workspace"]
    assert outside == model.activation_bytes(64, 512) + SAMPLING_BYTES_PER_LOGIT * model.vocab
    # y [T, K, H] in float32, h [T, K, I] in bfloat16; the sum in float32 and the output [T, H] in
    # bfloat16, 96 bytes a choice.
    assert device["expert workspace"] == 64 * (4 * 4 * 128 + 2 * 4 * 128 + 6 * 128 + 4 * 96)
    assert plan.host["expert arena"] == plan.host["page-locked"] == model.expert_bytes


def test_reference_kernels_hold_an_expert_in_float32() -> None:
    plan = make_plan(t0(), cpu(), PlanRequest(context_tokens=512, prefill_chunk=64))
    # y [K, H], 3 rows of H and 7 of I for a token of one expert, all in float32; the sum and the
    # output, 96 bytes a choice; a record of 12,288 bytes and its 6,144 weights in float32.
    per_token = 4 * (2 * 64 + 3 * 64 + 7 * 32) + 6 * 64 + 2 * 96
    assert plan.device["expert workspace"] == 64 * per_token + 12_288 + 4 * 6144


def test_prefill_is_charged_before_slots() -> None:
    """MB-01: room for dense weights, cache and all 48 experts exactly, and nothing else."""
    model = t1()
    budget = model.resident_bytes + 512 * model.kv_bytes_per_token + model.expert_bytes
    request = PlanRequest(vram_bytes=budget, context_tokens=512, prefill_chunk=64)
    plan = make_plan(model, cpu(), request).require_fit()
    assert 0 < plan.num_slots < 48
    assert plan.device.total_bytes <= budget


@pytest.mark.parametrize("machine", [cpu(), gpu()], ids=["cpu", "cuda"])
def test_explicit_cache_leaves_exactly_three_slots(machine) -> None:
    """MB-02: the least for a context of 4,096, and three experts of 12,288 bytes more."""
    request = PlanRequest(vram_bytes=1, context_tokens=4096)
    least = least_vram(make_plan(t0(), machine, request))
    plan = make_plan(t0(), machine, replace(request, vram_bytes=least + 3 * 12_288)).require_fit()
    assert plan.num_slots == 3
    assert plan.slots_per_layer == (2, 1)
    assert plan.context_tokens == 4096
    assert plan.device["KV cache"] == 4096 * 512
    assert plan.device["slots"] == 3 * 12_288


def test_declared_workspace_counts_to_the_byte() -> None:
    """MB-04: a backend's fixed 256 MiB; one byte less is refused by name."""
    fixed = Workspace("attention workspace", "of a fake backend", fixed_bytes=256 * MIB)
    without = least_vram(make_plan(t0(), cpu(), SMALL))
    enough = replace(SMALL, vram_bytes=without + 256 * MIB)
    assert make_plan(t0(), cpu(), enough, workspaces=[fixed]).fits

    short = replace(enough, vram_bytes=enough.vram_bytes - 1)
    (problem,) = make_plan(t0(), cpu(), short, workspaces=[fixed]).problems
    assert "attention workspace 256.10 MiB" in problem.message
    assert make_plan(t0(), cpu(), short).fits  # the control: not charged, not refused


def test_staging_degrades_with_the_budget() -> None:
    """MB-06: from two groups of 16 records down to two records, never to an error."""
    request = replace(SMALL, context_tokens=64)
    least = least_vram(make_plan(t1(), gpu(), request))
    plans = [
        make_plan(t1(), gpu(), replace(request, vram_bytes=least + extra * 98_304)).require_fit()
        for extra in (0, 4, 8, 30, 48)
    ]
    assert [plan.staging_records for plan in plans] == [2, 2, 4, 8, 0]
    assert [plan.num_slots for plan in plans] == [0, 4, 6, 23, 48]


def test_ring_is_two_groups_of_64_at_most() -> None:
    plan = make_plan(qwen3_30b(), gpu(), PlanRequest()).require_fit()
    assert plan.staging_records == 128
    assert plan.device["staging ring"] == 128 * 9_437_184


@pytest.mark.parametrize("machine", [cpu(), gpu(), gpu(free=4 * GIB)])
@pytest.mark.parametrize("vram", [None, 5 * GIB])
def test_auto_is_positive_and_stated(machine, vram) -> None:
    """MB-09: with every combination of the flags, auto is a number that works, with a reason."""
    plan = make_plan(qwen3_30b(), machine, PlanRequest(vram_bytes=vram))
    if not plan.fits:
        assert vram is not None and machine.device == "cuda"
        return
    for name in ("vram", "ram", "context", "prefill chunk"):
        assert choice(plan, name).effective > 0
        assert choice(plan, name).reason
    assert (choice(plan, "slots").effective > 0) == (machine.device == "cuda" or vram is not None)


def test_no_slots_on_cuda_is_a_warning() -> None:
    least = least_vram(make_plan(t0(), gpu(), SMALL))
    plan = make_plan(t0(), gpu(), replace(SMALL, vram_bytes=least)).require_fit()
    assert plan.num_slots == 0
    assert plan.warnings == (
        "no expert has a slot, every one is read over the link: a larger `--vram` or a smaller "
        "`--context` makes room",
    )


def test_requested_beside_effective() -> None:
    """UX-01: each number, what was asked, what it is and why; a layer without experts is said."""
    plan = make_plan(t4(), cpu(), PlanRequest(context_tokens=512)).require_fit()
    assert choice(plan, "context") == Choice("context", "tokens", 512, 512, "as set")
    assert choice(plan, "vram").requested is None
    slots = choice(plan, "slots")
    assert (slots.requested, slots.effective) == (None, 0)
    assert slots.reason == (
        "none on a CPU without `--vram` (2 MoE layers, 1 of 3 layers have no experts)"
    )
    assert len(plan.slots_per_layer) == 2


def test_surplus_gives_every_expert_a_slot_and_the_full_context() -> None:
    plan = make_plan(qwen3_30b(), gpu(free=90 * GIB), PlanRequest()).require_fit()
    assert plan.slots_per_layer == (128,) * 48
    assert (plan.context_tokens, plan.prefill_chunk, plan.staging_records) == (40_960, 2048, 0)
    assert choice(plan, "context").reason == "the model's longest"
    assert choice(plan, "staging records").reason == "no expert is missing"


def test_pools_by_record_size() -> None:
    """Two record sizes: one pool each, both split evenly, no layer above its experts."""
    small, large = expert_of(64, 32), expert_of(64, 64)
    layers = (
        MoELayer("a", 8, 2, small),
        MoELayer("b", 2, 2, large),
        MoELayer("c", 8, 2, small),
    )
    model = geometry(
        hidden=64, num_layers=3, num_experts=8, top_k=2, intermediate=32, layers=layers
    )
    least = least_vram(make_plan(model, cpu(), SMALL))
    extra = 3 * (2 * small.record_bytes) + 2 * large.record_bytes
    plan = make_plan(model, cpu(), replace(SMALL, vram_bytes=least + extra)).require_fit()
    assert plan.slots_per_layer == (3, 2, 3)
    assert [(pool.layers, pool.num_slots) for pool in plan.pools] == [((0, 2), 6), ((1,), 2)]
    assert sum(pool.record_bytes * pool.num_slots for pool in plan.pools) == plan.device["slots"]


def test_cpu_charges_the_device_side_to_the_host() -> None:
    plan = make_plan(t1(), cpu(), PlanRequest(vram_bytes=2 * MIB, context_tokens=256))
    assert plan.fits and plan.num_slots > 0
    assert plan.host["device side"] == plan.device.total_bytes
    assert plan.host["page-locked"] == 0
    resident_and_arena = t1().resident_bytes + t1().expert_bytes
    assert plan.host["loader peak"] == resident_and_arena + plan.host["loading"]


def test_loader_is_charged_what_it_promises() -> None:
    plan = make_plan(qwen3_30b(), gpu(), PlanRequest())
    assert plan.host["loader peak"] == plan.host["expert arena"] + 2 * GIB


def test_experts_that_host_memory_has_no_room_for_keep_their_slots() -> None:
    """54 GiB of experts: of 24 GiB of device memory some 15 hold experts."""
    plans = [
        make_plan(qwen3_30b(), gpu(available=ram * GIB), PlanRequest()) for ram in (60, 52, 46, 30)
    ]
    assert [plan.fits for plan in plans] == [True, True, True, False]
    roomy, short, shorter = (plan.require_fit() for plan in plans[:3])
    assert roomy.slot_only_per_layer == ()
    record = 9_437_184
    for plan in (short, shorter):
        kept = sum(plan.slot_only_per_layer)
        assert plan.slots_per_layer == roomy.slots_per_layer  # the device side is the same
        assert all(
            k <= s for k, s in zip(plan.slot_only_per_layer, plan.slots_per_layer, strict=True)
        )
        assert plan.host["expert arena"] == (6144 - kept) * record == plan.host["page-locked"]
        # As few as possible: one more copy would not fit.
        assert plan.host.total_bytes <= plan.host.budget_bytes < plan.host.total_bytes + record
        assert choice(plan, "host copies").effective == 6144 - kept
    assert sum(short.slot_only_per_layer) < sum(shorter.slot_only_per_layer)
    # On a CPU slots are host memory too.
    assert not make_plan(qwen3_30b(), cpu(available=52 * GIB), PlanRequest()).fits


def test_limits_are_lines_that_are_not_charged() -> None:
    plan = make_plan(t0(), gpu(memlock=65536), PlanRequest())
    assert plan.host["memlock limit"] == 65536
    assert make_plan(t0(), cpu(container=3 * GIB), PlanRequest()).host["container limit"] == 3 * GIB
    charged = sum(line.num_bytes for line in plan.host.lines if line.charged)
    assert plan.host.total_bytes == charged < charged + plan.host["page-locked"]


def test_memlock_below_the_pinned_bytes_is_a_warning() -> None:
    """HR-07: said with the remedy; refused only when registering really fails."""
    plan = make_plan(qwen3_30b(), gpu(memlock=8 * MIB), PlanRequest()).require_fit()
    assert plan.warnings == (
        "54.00 GiB of host memory will be page-locked, the memlock limit is 8.00 MiB; native "
        "Linux does not hold CUDA to it, some containers and WSL2 do: should it fail, use "
        "`ulimit -l unlimited`, or with docker `--ulimit memlock=-1`",
    )
    assert not make_plan(qwen3_30b(), gpu(), PlanRequest()).warnings


def test_large_contexts_of_unfused_attention_do_not_crowd_out_slots() -> None:
    """Scores of 6,400 bytes a pair: the context is cut before it takes most of the card."""
    model = replace(qwen3_30b(), activation_bytes_per_pair=6400, kv_bytes_per_token=1000)
    plan = make_plan(model, gpu(), PlanRequest()).require_fit()
    assert plan.device["KV cache"] + plan.device["attention workspace"] < plan.device["slots"] / 2
    assert plan.context_tokens < model.max_context


@pytest.mark.parametrize("most", [64 * MIB, 2 * GIB])
def test_what_a_context_takes_at_most_does_not_keep_it_short(most: int) -> None:
    """A workspace that grows by 128 KiB a token up to a most is no more than that: as if it were
    fixed. The control: one that goes on growing cuts the context."""
    model = pooled(qwen3_30b())
    grows = Workspace("latents", "of a fake model", bytes_per_context_token=128 * 1024)

    def context(*workspaces: Workspace) -> int:
        plan = make_plan(model, gpu(), PlanRequest(), workspaces=workspaces).require_fit()
        assert plan.num_slots < model.num_records, "or the context would be the longest"
        return plan.context_tokens

    capped = context(replace(grows, most_context_bytes=most))
    fixed = context(replace(grows, bytes_per_context_token=0, fixed_bytes=most))
    forever = context(grows)
    assert forever <= capped <= context()
    if most == 64 * MIB:  # which a context of 512 tokens has reached, one of 16,384 the other
        assert capped >= fixed - 512 and capped > 1.5 * forever


def pooled(model: ModelGeometry) -> ModelGeometry:
    """The same with attention over a pool: no masks, and prompts whose chunks run together."""
    layer = AttentionLayer("a", 0, 32, 4, 128, 128, None)
    return replace(model, attention=(layer,), activation_bytes_per_pair=0)


def test_what_a_later_chunk_gathers_is_one_layers_cache() -> None:
    """Of the layer that has most, whichever others have none; of a window no more than it holds."""
    wide = AttentionLayer("a", 0, 32, 4, 128, 64, None)
    near = AttentionLayer("b", 1, 32, 8, 128, 128, 100)
    request = PlanRequest(context_tokens=2048)

    def copies(*layers: AttentionLayer) -> int:
        model = replace(qwen3_30b(), attention=layers, activation_bytes_per_pair=0)
        return make_plan(model, gpu(), request).device["KV copies"]

    assert copies(wide) == copies(wide, near) == 2048 * 4 * (128 + 64) * 2
    assert copies(near) == 100 * 8 * (128 + 128) * 2


def test_a_chunk_that_runs_beside_others_is_the_same_for_every_budget() -> None:
    """Their experts cross the link once, so its length only has to keep the kernels busy."""
    plans = [
        make_plan(pooled(qwen3_30b()), gpu(free=free * GIB), PlanRequest(context_tokens=8192))
        for free in (12, 24, 40, 90)
    ]
    assert {plan.require_fit().prefill_chunk for plan in plans} == {2048}
    per_token = 60_000 + 8 * (4 * 2048 + 2 * 768) + 6 * 2048 + 8 * 96
    assert 2048 * per_token <= 512 * MIB < 4096 * per_token


@pytest.mark.parametrize(
    "machine", [cpu(), cpu(available=3 * GIB), gpu()], ids=["cpu", "3GiB", "gpu"]
)
@pytest.mark.parametrize("num_rows", [1, 4])
def test_the_context_that_auto_gives_may_be_written_out(machine: Machine, num_rows: int) -> None:
    """The chunk is part of how a prompt is rounded, so it must not hang on who said the context."""
    auto = PlanRequest(max_batch=num_rows)
    for model in (pooled(t0()), pooled(t1()), t1()):
        by_itself = make_plan(model, machine, auto)
        set_ = make_plan(model, machine, replace(auto, context_tokens=by_itself.context_tokens))
        assert by_itself.context_tokens == 8192
        sizes = [(p.prefill_chunk, p.num_slots, p.staging_records) for p in (by_itself, set_)]
        assert sizes[0] == sizes[1]


def test_tokens_that_wait_for_other_chunks_are_charged() -> None:
    plan = make_plan(pooled(qwen3_30b()), gpu(), PlanRequest(context_tokens=8192))
    waiting = 2 * (4 * 2048 + 2 * 128) + 4 * 128
    assert plan.device["prompt"] == 8192 * (waiting + 6 * 2048 + 8 * 96)
    assert "prompt" not in [
        line.name for line in make_plan(qwen3_30b(), gpu(), PlanRequest()).device.lines
    ]


def test_a_long_chunk_runs_its_experts_in_blocks() -> None:
    """Outputs of one block of tokens are held, whatever the chunk: of 4,096 with 8 choices."""
    sizes = [
        make_plan(
            qwen3_30b(), gpu(), PlanRequest(context_tokens=32768, prefill_chunk=chunk)
        ).device["expert workspace"]
        for chunk in (4096, 8192, 16384)
    ]
    kept = 6 * 2048 + 8 * 96
    assert sizes[1] - sizes[0] == 4096 * kept and sizes[2] - sizes[1] == 8192 * kept


def test_json_form() -> None:
    data = make_plan(t0(), gpu(), PlanRequest()).to_dict()
    assert data["fits"] is True
    assert {"name", "bytes", "charged", "note"} == data["device"]["lines"][0].keys()
    charged = [line["bytes"] for line in data["host"]["lines"] if line["charged"]]
    assert sum(charged) == data["host"]["total_bytes"]
    assert data["num_slots"] == sum(data["slots_per_layer"]) == 16
