"""BF16 experts in 12 bits on a GPU: of one token every bit of plain records' sums, where rows are
whole groups of 8 columns; else and of several, sums within their bound, which do not depend on
places."""

from __future__ import annotations

import pytest
import torch

from hotset.core.formats import LOSSLESS
from hotset.kernels.dispatch import ReferenceKernels, TritonKernels
from kernels.support import Experts, addresses_of, make_experts, make_inputs, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TRITON, REFERENCE = TritonKernels(), ReferenceKernels()
NUM_EXPERTS, TOP_K = 16, 4

# Of Qwen3-30B-A3B, one of 8 columns times an odd number, and one that nothing divides.
SHAPES = pytest.mark.parametrize("shape", [(2048, 768), (1032, 520), (1031, 517)], ids=str)


def both(hidden: int, intermediate: int) -> tuple[Experts, Experts]:
    """(plain, lossless) records of the same weights."""
    packed = make_experts(
        NUM_EXPERTS,
        hidden=hidden,
        intermediate=intermediate,
        bias=True,
        dtype="bfloat16",
        weights=LOSSLESS,
    )
    spec = packed.spec.as_plain()
    records = torch.zeros(NUM_EXPERTS, spec.record_bytes, dtype=torch.uint8, device="cuda")
    REFERENCE.dequantise_records(packed.addresses, packed.spec, records)
    return Experts(spec, records), packed


def in_host_memory(experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """(page-locked copies, their addresses)."""
    copies = torch.empty(experts.records.shape, dtype=torch.uint8, pin_memory=True)
    copies.copy_(experts.records)
    rows = torch.arange(NUM_EXPERTS, device="cuda") * copies.stride(0)
    return copies, rows + copies.data_ptr()


@SHAPES
def test_whole_records_become_the_plain_ones(shape: tuple[int, int]) -> None:
    plain, packed = both(*shape)
    made = torch.zeros_like(plain.records)
    TRITON.dequantise_records(packed.addresses, packed.spec, made)
    assert torch.equal(made, plain.records)


@SHAPES
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 40, 300])
def test_sums_wherever_records_are(shape: tuple[int, int], num_tokens: int) -> None:
    plain, packed = both(*shape)
    x_TH, ids_TK = make_inputs(packed, num_tokens, TOP_K)
    want = TRITON.expert_outputs(x_TH, ids_TK, plain.addresses, plain.spec)
    got = TRITON.expert_outputs(x_TH, ids_TK, packed.addresses, packed.spec)
    # A plain row that begins at any address is read by narrower loads, and summed in their order.
    if num_tokens == 1 and all(size % 8 == 0 for size in shape):
        assert torch.equal(got, want)
    oracle(plain, x_TH, ids_TK).check(got)

    copies, host_E = in_host_memory(packed)
    odd = torch.arange(NUM_EXPERTS, device="cuda") % 2 == 1
    address_E = torch.where(odd, host_E, packed.addresses)
    assert torch.equal(TRITON.expert_outputs(x_TH, ids_TK, address_E, packed.spec), got)

    # What also fills slots is a kernel of its own; it runs whether there is something to fill.
    slots = Experts(packed.spec, torch.zeros_like(packed.records))
    filling = []
    for fill_E in (addresses_of(slots.records), torch.zeros_like(address_E)):
        filling.append(TRITON.expert_outputs(x_TH, ids_TK, address_E, packed.spec, fill_E=fill_E))
    assert torch.equal(*filling)
    for expert in set(ids_TK.flatten().tolist()) & set(range(NUM_EXPERTS)):
        for field, value in slots.fields(expert).items():
            source = packed.fields(expert)[field]
            assert torch.equal(value.view(torch.uint8), source.view(torch.uint8)), field
    del copies  # the kernels have run
