"""The Triton expert kernels and the reference against an FP64 oracle, and wrong ones caught."""

from __future__ import annotations

import pytest
import torch

from hotset.kernels import reference
from hotset.kernels.dispatch import Kernels, ReferenceKernels, TritonKernels
from kernels.support import (
    DEVICE,
    GATES,
    MISTAKES,
    Experts,
    make_experts,
    make_inputs,
    mistaken,
    oracle,
    round_to_tf32,
)

DTYPES = ("float32", "bfloat16", "float16")
TRITON, REFERENCE = TritonKernels(), ReferenceKernels()
BOTH = pytest.mark.parametrize("kernels", [TRITON, REFERENCE], ids=lambda k: k.name)


def check(kernels: Kernels, experts: Experts, x_TH: torch.Tensor, ids_TK: torch.Tensor) -> None:
    y_TKH = kernels.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)
    assert y_TKH.dtype == torch.float32
    oracle(experts, x_TH, ids_TK).check(y_TKH)


@BOTH
@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate(kernels: Kernels, gate: str, dtype: str, num_tokens: int) -> None:
    experts = make_experts(5, hidden=53, intermediate=29, gate=GATES[gate], bias=True, dtype=dtype)
    check(kernels, experts, *make_inputs(experts, num_tokens, 3))


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 17, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("hidden", "intermediate"),
    [
        (1, 1),
        (37, 23),  # primes: rows start anywhere, every tile is cut
        (131, 70),  # more than one step of a reduction, the last one cut
        (530, 11),  # the same for one token, whose steps are longer
    ],
)
def test_shapes(hidden: int, intermediate: int, dtype: str, num_tokens: int) -> None:
    experts = make_experts(5, hidden=hidden, intermediate=intermediate, dtype=dtype)
    check(TRITON, experts, *make_inputs(experts, num_tokens, 2))


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "hidden", "intermediate"),
    [
        ("float32", 1, 256, 128),
        ("bfloat16", 1, 512, 256),
        ("float32", 2, 256, 128),
        ("bfloat16", 2, 256, 128),
        ("bfloat16", 8, 512, 256),
        ("bfloat16", 40, 256, 128),
    ],
)
def test_whole_tiles_only(dtype: str, num_tokens: int, hidden: int, intermediate: int) -> None:
    """Sizes that every tile divides: the code without masks."""
    experts = make_experts(3, hidden=hidden, intermediate=intermediate, bias=True, dtype=dtype)
    check(TRITON, experts, *make_inputs(experts, num_tokens, 1, padding=False))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_128_tokens(dtype: str) -> None:
    experts = make_experts(2, hidden=67, intermediate=41, bias=True, dtype=dtype)
    x_TH, ids_TK = make_inputs(experts, 150, 2)
    assert TRITON.group(ids_TK, 2).block_tokens == 128
    check(TRITON, experts, x_TH, ids_TK)


IDS = {
    "all on one expert": [[3, 3]] * 40,
    "one expert twice in a row": [[2, 2, 4]],
    "more pairs of an expert than tokens": [[1, 1, 1]] * 9,
    "all padding": [[-1, 5], [6, -7]],
    "all padding, one token": [[-1, 5]],
    "first and last expert": [[0, 4], [4, 0], [0, 0]],
}


@BOTH
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
def test_routings(kernels: Kernels, ids: list[list[int]]) -> None:
    experts = make_experts(5, hidden=37, intermediate=23, bias=True, dtype="bfloat16")
    ids_TK = torch.tensor(ids, device=DEVICE)
    x_TH, _ = make_inputs(experts, len(ids), 1)
    check(kernels, experts, x_TH, ids_TK)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_ids_may_be_int32(num_tokens: int) -> None:
    experts = make_experts(5, hidden=37, intermediate=23)
    x_TH, ids_TK = make_inputs(experts, num_tokens, 2)
    check(TRITON, experts, x_TH, ids_TK.int())


@BOTH
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_ids_and_weights_may_be_slices(kernels: Kernels, num_tokens: int) -> None:
    experts = make_experts(5, hidden=37, intermediate=23)
    x_TH, wide = make_inputs(experts, num_tokens, 6)
    ids_TK, weights_TK = wide[:, :2], torch.rand(num_tokens, 6, device=DEVICE)[:, :2]
    check(kernels, experts, x_TH, ids_TK)
    y_TKH = kernels.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)
    got = kernels.combine(y_TKH, weights_TK, torch.float32)
    assert torch.equal(got, kernels.combine(y_TKH, weights_TK.contiguous(), torch.float32))


@BOTH
def test_no_tokens(kernels: Kernels) -> None:
    experts = make_experts(5, hidden=37, intermediate=23)
    x_TH, ids_TK = make_inputs(experts, 0, 2)
    assert kernels.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec).shape == (0, 2, 37)


@BOTH
def test_nan_weights_are_not_hidden_by_a_clamp(kernels: Kernels) -> None:
    for gate in ("clamped", "swiglu_oai", "clamped_after", "relu"):
        experts = make_experts(2, hidden=16, intermediate=8, gate=GATES[gate])
        experts.fields(1)["up"][3, 5] = torch.nan
        for num_tokens in (1, 3):
            x_TH, _ = make_inputs(experts, num_tokens, 1)
            ids_TK = torch.ones(num_tokens, 1, dtype=torch.int64, device=DEVICE)
            y_TKH = kernels.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)
            assert y_TKH.isnan().all(), gate


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_control_a_wrong_kernel_is_caught(mistake, dtype: str, num_tokens: int) -> None:
    """The check above must fail by far for each way in which a kernel could be wrong."""
    experts = make_experts(5, hidden=53, intermediate=29, bias=True, dtype=dtype)
    wrong = mistaken(experts, mistake)
    x_TH, ids_TK = make_inputs(experts, num_tokens, 3, padding=False)
    y_TKH = TRITON.expert_outputs(x_TH, ids_TK, wrong.addresses, wrong.spec)
    assert oracle(experts, x_TH, ids_TK).excess(y_TKH) > 5


def test_control_tf32_is_caught() -> None:
    experts = make_experts(5, hidden=530, intermediate=29)
    wrong = mistaken(experts, round_to_tf32)
    x_TH, ids_TK = make_inputs(experts, 9, 3)
    y_TKH = REFERENCE.expert_outputs(x_TH, ids_TK, wrong.addresses, wrong.spec)
    assert oracle(experts, x_TH, ids_TK).excess(y_TKH) > 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_control_an_intermediate_that_is_not_rounded_is_caught(dtype: str) -> None:
    experts = make_experts(1, hidden=53, intermediate=29, dtype=dtype)
    x_TH, _ = make_inputs(experts, 9, 1)
    ids_TK = torch.zeros(9, 1, dtype=torch.int64, device=DEVICE)
    unrounded = reference.expert_output(x_TH.float(), experts.records[0], experts.spec)
    assert oracle(experts, x_TH, ids_TK).excess(unrounded[:, None]) > 5
