"""Quantised experts on a GPU: exact weights, sums within their bound, places that do not matter."""

from __future__ import annotations

import pytest
import torch

from hotset.core.formats import MXFP4, NVFP4, WeightFormat, fp8, int4
from hotset.kernels.dispatch import ReferenceKernels, TritonKernels
from kernels.support import Experts, addresses_of, make_experts, make_inputs, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TRITON, REFERENCE = TritonKernels(), ReferenceKernels()

# (format, H, I): of Qwen3-30B-A3B, gpt-oss, GLM-4.5-Air; and one that nothing divides
CASES: dict[str, tuple[WeightFormat, int, int]] = {
    "fp8": (fp8("bfloat16"), 2048, 768),
    "fp8 channel": (fp8("float32", block=(1, None)), 2048, 768),
    "nvfp4": (NVFP4, 2048, 768),
    "mxfp4": (MXFP4, 2880, 2880),
    "int4": (int4("bfloat16", group=128), 4096, 1408),
    "int4 zeros": (int4("float16", group=32, has_zeros=True), 1031, 517),
}
EVERY = pytest.mark.parametrize("name", CASES)
TOKENS = pytest.mark.parametrize("num_tokens", [1, 2, 17, 40, 300])


def experts_of(name: str) -> Experts:
    weights, hidden, intermediate = CASES[name]
    return make_experts(
        16, hidden=hidden, intermediate=intermediate, bias=True, dtype="bfloat16", weights=weights
    )


@EVERY
def test_whole_records_dequantise_to_the_bits_of_the_specification(name: str) -> None:
    experts = experts_of(name)
    size = (len(experts.records), experts.spec.as_plain().record_bytes)
    found = []
    for kernels in (TRITON, REFERENCE):
        out = torch.zeros(size, dtype=torch.uint8, device="cuda")
        kernels.dequantise_records(experts.addresses, experts.spec, out)
        found.append(out)
    assert torch.equal(*found)


@EVERY
@TOKENS
def test_within_the_bound_wherever_records_are(name: str, num_tokens: int) -> None:
    experts = experts_of(name)
    x_TH, ids_TK = make_inputs(experts, num_tokens, 4)
    expected = TRITON.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)
    oracle(experts, x_TH, ids_TK).check(expected)

    moved = experts.copy()
    odd = torch.arange(16, device="cuda") % 2 == 1
    address_E = torch.where(odd, moved.addresses, experts.addresses)
    got = TRITON.expert_outputs(x_TH, ids_TK, address_E, experts.spec)
    assert torch.equal(got, expected)

    slots = Experts(experts.spec, torch.zeros_like(experts.records))
    TRITON.expert_outputs(x_TH, ids_TK, address_E, experts.spec, fill_E=addresses_of(slots.records))
    for expert in set(ids_TK.flatten().tolist()) & set(range(16)):
        for field, value in slots.fields(expert).items():
            source = experts.fields(expert)[field]
            assert torch.equal(value.view(torch.uint8), source.view(torch.uint8)), field


@pytest.mark.parametrize("zero", range(17))
def test_every_int4_code_with_every_bfloat16_scale(zero: int) -> None:
    """These are made in BF16, two at a time: subnormal and infinite scales and both zeros too."""
    experts = make_experts(
        1,
        hidden=2048,
        intermediate=128,
        dtype="bfloat16",
        weights=int4("bfloat16", group=8, has_zeros=True),
    )
    plain, fields = experts.spec.as_plain(), experts.fields(0)
    scales = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16)
    fields["up_scale"].copy_(scales.view(torch.bfloat16).view(fields["up_scale"].shape))
    fields["up_zero"].fill_(zero)
    for word in (0x76543210, 0xFEDCBA98 - 2**32):
        fields["up"].view(torch.int32).fill_(word)
        weights = []
        for kernels in (TRITON, REFERENCE):
            out = torch.zeros(1, plain.record_bytes, dtype=torch.uint8, device="cuda")
            kernels.dequantise_records(experts.addresses, experts.spec, out)
            weights.append(Experts(plain, out).fields(0)["up"])
        number = ~weights[1].isnan()
        assert torch.equal(~weights[0].isnan(), number)
        got, want = (w.view(torch.int16)[number] for w in weights)
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("weights", "intermediate"), [(fp8("bfloat16", block=(1, 256)), 4096), (MXFP4, 128)]
)
def test_every_code_with_every_scale_that_bfloat16_holds(
    weights: WeightFormat, intermediate: int
) -> None:
    """FP8 with BF16 scales and MXFP4 are multiplied in BF16 pairs: NaN and subnormals as well."""
    experts = make_experts(
        1, hidden=2048, intermediate=intermediate, dtype="bfloat16", weights=weights
    )
    plain, fields = experts.spec.as_plain(), experts.fields(0)
    scale = fields["up_scale"]
    scales = torch.arange(scale.numel(), dtype=torch.int32, device=scale.device)
    as_bits = {1: torch.uint8, 2: torch.int16}[scale.element_size()]
    scale.copy_(scales.to(as_bits).view(scale.dtype).view(scale.shape))
    codes = fields["up"].view(torch.uint8)
    codes.copy_(torch.arange(codes.numel(), device=codes.device).to(torch.uint8).view(codes.shape))
    made = []
    for kernels in (TRITON, REFERENCE):
        out = torch.zeros(1, plain.record_bytes, dtype=torch.uint8, device=codes.device)
        kernels.dequantise_records(experts.addresses, experts.spec, out)
        made.append(Experts(plain, out).fields(0)["up"])
    number = ~made[1].isnan()
    assert 0 < number.sum() < number.numel()
    assert torch.equal(~made[0].isnan(), number)
    got, want = (w.view(torch.int16)[number] for w in made)
    assert torch.equal(got, want)
