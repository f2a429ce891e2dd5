"""Quantised experts in the kernels: every code, every weight exactly, sums within their bound.

Weights are checked exactly, since one wrong rounding of one weight would hide in any bound of a
sum: an identity matrix as input, and one as the other projection, let each of them through alone.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from hotset.core.geometry import Activation, Gate, GateForm
from hotset.kernels.codes import code_values
from hotset.kernels.codes import decode_e4m3 as e4m3_in_registers
from hotset.kernels.codes import decode_e8m0 as e8m0_in_registers
from hotset.kernels.dequantise import decode_e2m1, decode_e4m3, decode_e8m0, multiplied_weights
from hotset.kernels.dispatch import ReferenceKernels, TritonKernels
from hotset.kernels.packed import Matrix
from kernels.packed_support import (
    FORMATS,
    KINDS,
    MISTAKES,
    Change,
    down_only,
    packed_experts,
    up_only,
)
from kernels.support import (
    DEVICE,
    GATES,
    Experts,
    addresses_of,
    make_inputs,
    mistaken,
    oracle,
)

TRITON, REFERENCE = TritonKernels(), ReferenceKernels()
EVERY = pytest.mark.parametrize("name", FORMATS)


@triton.jit
def _scales_kernel(code, e4m3, e8m0):
    i = tl.arange(0, 256)
    tl.store(e4m3 + i, e4m3_in_registers(tl.load(code + i)))
    tl.store(e8m0 + i, e8m0_in_registers(tl.load(code + i)))


@triton.jit
def _codes_kernel(word, out, num_words, CODES: tl.constexpr, PER_WORD: tl.constexpr):
    i = tl.arange(0, 64)
    half: tl.constexpr = PER_WORD // 2
    words = tl.load(word + i, mask=i < num_words, other=0)
    for j in tl.static_range(half):
        low, high = code_values(words, 8.0, j, CODES)
        tl.store(out + i * PER_WORD + j, low, mask=i < num_words)
        tl.store(out + i * PER_WORD + j + half, high, mask=i < num_words)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits, NaN where NaN is wanted."""
    number = ~want.isnan()
    return torch.equal(got.isnan(), ~number) and torch.equal(
        got[number].view(torch.int32), want[number].view(torch.int32)
    )


def test_every_scale_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    e4m3, e8m0 = torch.empty(2, 256, device=DEVICE)
    _scales_kernel[(1,)](codes, e4m3, e8m0)
    assert same(e4m3, decode_e4m3(codes))
    assert same(e8m0, decode_e8m0(codes))


def test_every_code_at_every_place_of_a_word() -> None:
    def decoded(codes: torch.Tensor, kind: str) -> torch.Tensor:
        words = codes.view(torch.int32)
        per_word = 4 if kind == "fp8" else 8
        out = torch.empty(len(words) * per_word, device=DEVICE)
        _codes_kernel[(1,)](words, out, len(words), CODES=kind, PER_WORD=per_word)
        return out

    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    for first in range(0, 4):  # each code comes to each of the four bytes
        rolled = codes.roll(first)
        assert same(decoded(rolled, "fp8"), decode_e4m3(rolled))
        nibbles = torch.stack((rolled & 15, rolled >> 4), dim=-1).flatten()
        assert same(decoded(rolled, "fp4"), decode_e2m1(nibbles))
        assert torch.equal(decoded(rolled, "int4"), nibbles.float() - 8)


NO_GATE = Gate(GateForm.NONE, Activation.RELU)


# Each format rounds to BF16; the other dtypes differ from it in nothing but the last conversion.
EVERY_AND_DTYPES = pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "bfloat16") for name in FORMATS] + [("nvfp4", "float32"), ("int4", "float16")],
)
SIZE = 21  # cuts words, groups and blocks


@EVERY_AND_DTYPES
def test_every_weight_of_the_first_projection(name: str, dtype: str) -> None:
    """Through `relu` with both signs, W_down = 1: y[t] = max(+-W_up[:, t], 0), no rounding left."""
    size = SIZE
    experts = up_only(name, hidden=size, intermediate=size, gate=NO_GATE, dtype=dtype)
    experts.fields(0)["down"].copy_(torch.eye(size))
    up, _ = multiplied_weights(experts.fields(0), experts.spec)
    eye = torch.eye(size, device=DEVICE)
    check_exactly(experts, torch.cat((eye, -eye)), torch.cat((up.T, -up.T)).relu())


@EVERY_AND_DTYPES
def test_every_weight_of_the_second_projection(name: str, dtype: str) -> None:
    """With W_up = 1 the input comes through unchanged: y[t] = W_down[:, t]."""
    size = SIZE
    experts = down_only(name, hidden=size, intermediate=size, gate=NO_GATE, dtype=dtype)
    experts.fields(0)["up"].copy_(torch.eye(size))
    _, down = multiplied_weights(experts.fields(0), experts.spec)
    check_exactly(experts, torch.eye(size, device=DEVICE), down.T)


def check_exactly(experts: Experts, x_TH: torch.Tensor, want_TH: torch.Tensor) -> None:
    """All tokens together, and two of them alone, whose kernel is another."""
    x_TH = x_TH.to(getattr(torch, experts.spec.dtype)).contiguous()
    runs = [slice(None), slice(13, 14), slice(SIZE - 1, SIZE)]
    for tokens in runs:
        x = x_TH[tokens]
        ids_TK = torch.zeros(len(x), 1, dtype=torch.int64, device=DEVICE)
        y_TKH = TRITON.expert_outputs(x, ids_TK, experts.addresses, experts.spec)
        assert torch.equal(y_TKH[:, 0], want_TH[tokens])


@EVERY
@pytest.mark.parametrize(("num_tokens", "dtype"), [(1, "bfloat16"), (6, "float32")])
def test_sums_within_their_bound(name: str, num_tokens: int, dtype: str) -> None:
    experts = packed_experts(name, 2, hidden=45, intermediate=19, bias=True, dtype=dtype)
    x_TH, ids_TK = make_inputs(experts, num_tokens, 1)
    exact = oracle(experts, x_TH, ids_TK)
    for kernels in (TRITON, REFERENCE):
        exact.check(kernels.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate(gate: str, name: str) -> None:
    experts = packed_experts(
        name, 1, hidden=20, intermediate=9, gate=GATES[gate], bias=True, dtype="bfloat16"
    )
    x_TH, ids_TK = make_inputs(experts, 2, 1, padding=False)
    y_TKH = TRITON.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)
    oracle(experts, x_TH, ids_TK).check(y_TKH)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_whole_tiles_only(num_tokens: int) -> None:
    """Sizes that every tile divides: the code without masks."""
    experts = packed_experts("fp8 block", 1, hidden=128, intermediate=128, dtype="bfloat16")
    x_TH, ids_TK = make_inputs(experts, num_tokens, 1, padding=False)
    y_TKH = TRITON.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)
    oracle(experts, x_TH, ids_TK).check(y_TKH)


# Rows that do not begin on a line of 128 bytes: they have 416 bytes, or 320.
CUT_LINES = [("mxfp4", 832, 4), ("int4 zeros", 640, 2), ("fp8 tensor", 320, 2)]


@pytest.mark.parametrize(("name", "columns", "stride"), CUT_LINES)
def test_rows_that_begin_anywhere_in_a_line(name: str, columns: int, stride: int) -> None:
    """One token, tiles of every `stride`-th row: sums, and records that are filled on the way."""
    for which, hidden, inter in (("up", columns, 40), ("down", 12, columns)):
        experts = packed_experts(
            name, 1, hidden=hidden, intermediate=inter, gate=NO_GATE, dtype="bfloat16"
        )
        assert Matrix.of(experts.spec, which).line_period == stride
        x_TH, ids_TK = make_inputs(experts, 1, 1, padding=False)
        slots = torch.zeros_like(experts.records)
        y_TKH = TRITON.expert_outputs(
            x_TH, ids_TK, experts.addresses, experts.spec, fill_E=addresses_of(slots)
        )
        oracle(experts, x_TH, ids_TK).check(y_TKH)
        for field in experts.spec.layout.fields:
            part = slice(field.offset, field.offset + field.nbytes)
            assert torch.equal(slots[:, part], experts.records[:, part]), field.name


@pytest.mark.parametrize(("name", "mistake"), MISTAKES, ids=lambda v: getattr(v, "__name__", v))
def test_control_a_wrong_kernel_is_caught(name: str, mistake: Change) -> None:
    """The bound must be exceeded by far for each way in which a record could be read wrongly."""
    experts = packed_experts(name, 1, hidden=40, intermediate=18, bias=True, dtype="bfloat16")
    wrong = mistaken(experts, mistake)
    for num_tokens in (1, 2):
        x_TH, ids_TK = make_inputs(experts, num_tokens, 1, padding=False)
        y_TKH = TRITON.expert_outputs(x_TH, ids_TK, wrong.addresses, wrong.spec)
        assert oracle(experts, x_TH, ids_TK).excess(y_TKH) > 5
