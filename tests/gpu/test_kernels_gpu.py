"""The expert kernels on a GPU at real sizes: right, placement-blind, capturable, exact fills."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch

from hotset.core.geometry import Activation, Gate, GateForm
from hotset.kernels.dispatch import ReferenceKernels, TritonKernels
from hotset.kernels.gather import gather_records
from hotset.kernels.grouping import group_by_sorting, group_in_one_program
from kernels.support import Experts, addresses_of, make_experts, make_inputs, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_EXPERTS, TOP_K = 128, 8
MAPPED = 2  # cudaHostRegisterMapped
TOKENS = pytest.mark.parametrize("num_tokens", [1, 2, 8, 16, 17, 64, 300])
TRITON = TritonKernels()


@pytest.fixture(scope="module")
def experts() -> Experts:
    """The expert shape of Qwen3-30B-A3B, 1.2 GB in VRAM."""
    return make_experts(NUM_EXPERTS, hidden=2048, intermediate=768, dtype="bfloat16")


@pytest.fixture(scope="module")
def host_addresses(experts: Experts) -> Iterator[torch.Tensor]:
    """Addresses of the same records in mapped, page-locked host memory."""
    nbytes = experts.records.numel()
    memory = mmap.mmap(-1, nbytes)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    assert int(torch.cuda.cudart().cudaHostRegister(view.data_ptr(), nbytes, MAPPED)) == 0
    view.copy_(experts.records.flatten())
    host = view.view(experts.records.shape)
    yield addresses_of(host).cuda()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(view.data_ptr())


@TOKENS
def test_within_the_derived_bound(experts: Experts, num_tokens: int) -> None:
    x_TH, ids_TK = make_inputs(experts, num_tokens, TOP_K)
    exact = oracle(experts, x_TH, ids_TK)
    for kernels in (TRITON, ReferenceKernels()):
        exact.check(kernels.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "gate",
    [
        Gate(GateForm.NONE, Activation.RELU2),
        Gate(GateForm.PLAIN, Activation.GELU),
        Gate(GateForm.CLAMPED, limit=0.8),
        Gate(GateForm.SWIGLU_OAI, limit=0.9, alpha=1.702),
        Gate(GateForm.CLAMPED_AFTER, limit=0.4),
        Gate(GateForm.SOFTCAPPED, gate_cap=1.5, up_cap=0.7),
    ],
    ids=lambda gate: gate.form.value,
)
def test_gates_and_biases(gate: Gate, dtype: str) -> None:
    experts = make_experts(16, hidden=1031, intermediate=517, gate=gate, bias=True, dtype=dtype)
    for num_tokens in (1, 8):
        check(experts, num_tokens)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(2880, 1440), (1031, 517)])
def test_sizes_that_no_tile_divides(hidden: int, intermediate: int, dtype: str) -> None:
    experts = make_experts(16, hidden=hidden, intermediate=intermediate, bias=True, dtype=dtype)
    for num_tokens in (1, 8, 40, 400):
        check(experts, num_tokens)


def check(experts: Experts, num_tokens: int) -> None:
    x_TH, ids_TK = make_inputs(experts, num_tokens, 4)
    y_TKH = TRITON.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)
    oracle(experts, x_TH, ids_TK).check(y_TKH)


@TOKENS
def test_host_memory_and_slots_give_equal_bits(
    experts: Experts, host_addresses: torch.Tensor, num_tokens: int
) -> None:
    x_TH, ids_TK = make_inputs(experts, num_tokens, TOP_K)
    slots_E = experts.addresses
    expected = TRITON.expert_outputs(x_TH, ids_TK, slots_E, experts.spec)
    mixed_E = torch.where(torch.rand(NUM_EXPERTS, device="cuda") < 0.4, slots_E, host_addresses)
    for address_E in (host_addresses, mixed_E):
        got = TRITON.expert_outputs(x_TH, ids_TK, address_E, experts.spec)
        assert torch.equal(got, expected)
    mixed_E[ids_TK[0].clamp(0, NUM_EXPERTS - 1)] = slots_E[0]  # control: addresses are what is read
    changed = TRITON.expert_outputs(x_TH, ids_TK, mixed_E, experts.spec)
    assert not torch.equal(changed, expected)


@TOKENS
def test_fills_from_host_memory_are_exact(
    experts: Experts, host_addresses: torch.Tensor, num_tokens: int
) -> None:
    x_TH, ids_TK = make_inputs(experts, num_tokens, TOP_K)
    nothing_E = torch.zeros_like(host_addresses)  # the same program
    expected = TRITON.expert_outputs(x_TH, ids_TK, host_addresses, experts.spec, fill_E=nothing_E)
    slots = torch.full_like(experts.records, 0xFF)
    got = TRITON.expert_outputs(
        x_TH, ids_TK, host_addresses, experts.spec, fill_E=addresses_of(slots)
    )
    assert torch.equal(got, expected)
    routed = torch.unique(ids_TK[(ids_TK >= 0) & (ids_TK < NUM_EXPERTS)])
    assert torch.equal(slots[routed], experts.records[routed])
    others = torch.ones(NUM_EXPERTS, dtype=torch.bool, device="cuda")
    others[routed] = False
    assert (slots[others] == 0xFF).all()


@TOKENS
def test_groups_of_experts_in_turn_equal_one_call(experts: Experts, num_tokens: int) -> None:
    x_TH, ids_TK = make_inputs(experts, num_tokens, TOP_K)
    expected = TRITON.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)
    for group_size in (32, 50):
        out = torch.full_like(expected, torch.nan)
        grouping = TRITON.group(ids_TK, NUM_EXPERTS)
        for first in range(0, NUM_EXPERTS, group_size):
            address_E = torch.zeros_like(experts.addresses)
            address_E[first : first + group_size] = experts.addresses[first : first + group_size]
            TRITON.expert_outputs(x_TH, ids_TK, address_E, experts.spec, grouping=grouping, out=out)
        assert torch.equal(out, expected)


@TOKENS
def test_a_layer_never_waits_and_replays_from_a_graph(experts: Experts, num_tokens: int) -> None:
    x_TH, ids_TK = make_inputs(experts, num_tokens, TOP_K)
    weights_TK = torch.rand(num_tokens, TOP_K, device="cuda")
    address_E = experts.addresses

    def layer() -> torch.Tensor:
        y_TKH = TRITON.expert_outputs(x_TH, ids_TK, address_E, experts.spec)
        return TRITON.combine(y_TKH, weights_TK, torch.bfloat16)

    layer()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    graph.replay()
    assert torch.equal(captured, eager)

    other_x, other_ids = make_inputs(experts, num_tokens, TOP_K, seed=7)
    x_TH.copy_(other_x)
    ids_TK.copy_(other_ids)
    graph.replay()
    assert torch.equal(captured, layer())


@pytest.mark.parametrize("num_tokens", [1, 16, 32])
def test_both_groupings_agree(num_tokens: int) -> None:
    ids_TK = torch.randint(-1, NUM_EXPERTS + 1, (num_tokens, TOP_K), device="cuda")
    one = group_in_one_program(ids_TK, NUM_EXPERTS, 16)
    other = group_by_sorting(ids_TK, NUM_EXPERTS, 16)
    used = other.block_expert_B >= 0
    for name in ("order_N", "counts_E", "bounds", "block_expert_B"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.block_start_B[used], other.block_start_B[used])


def test_gather_from_host_memory(experts: Experts, host_addresses: torch.Tensor) -> None:
    order = torch.randperm(NUM_EXPERTS, device="cuda")[:40]
    got = gather_records(host_addresses[order], experts.spec.record_bytes)
    assert torch.equal(got, experts.records[order])
