"""The specification against formulas written out one number at a time, and how it reads."""

from __future__ import annotations

import math

import pytest
import torch

from hotset.kernels import reference
from kernels.support import GATES, make_experts, make_inputs


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def clamp(x: float, limit: float) -> float:
    return max(-limit, min(limit, x))


# h for one unit, as in the model code of the families that each form comes from.
FORMULAS = {
    "no gate, relu2": lambda g, u: max(u, 0.0) ** 2,
    "no gate, silu": lambda g, u: u * sigmoid(u),
    "silu": lambda g, u: g * sigmoid(g) * u,
    "gelu": lambda g, u: g * 0.5 * (1 + math.erf(g / math.sqrt(2))) * u,
    "gelu_tanh": lambda g, u: (
        g * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
    ),
    "relu": lambda g, u: max(g, 0.0) * u,
    "clamped": lambda g, u: min(g, 0.8) * sigmoid(min(g, 0.8)) * clamp(u, 0.8),
    "swiglu_oai": lambda g, u: min(g, 0.9) * sigmoid(1.702 * min(g, 0.9)) * (clamp(u, 0.9) + 1),
    "clamped_after": lambda g, u: min(g * sigmoid(g), 0.4) * clamp(u, 0.4),
    "softcapped": lambda g, u: 1.5 * math.tanh(g / 1.5) * sigmoid(g) * 0.7 * math.tanh(u / 0.7),
}


@pytest.mark.parametrize("name", GATES)
def test_gate_formulas(name: str) -> None:
    gate = GATES[name]
    values = [-3.0, -0.95, -0.3, 0.0, 0.2, 0.85, 2.5]
    pairs = [(g, u) for g in values for u in values]
    rows = torch.tensor(pairs, dtype=torch.float64)
    u = rows.T.reshape(1, -1) if gate.has_gate else rows[:, 1][None]
    expected = torch.tensor([FORMULAS[name](*pair) for pair in pairs], dtype=torch.float64)
    # Both in FP64 from the same formula: a few of its units.
    assert torch.allclose(reference.apply_gate(u, gate)[0], expected, rtol=1e-13, atol=1e-14)


def test_every_field_is_read_at_its_place() -> None:
    """A byte changed in any field changes the output; bytes between fields do not."""
    cpu = torch.device("cpu")
    experts = make_experts(2, hidden=5, intermediate=3, bias=True, device=cpu)
    spec = experts.spec
    x_TH, ids_TK = make_inputs(experts, 3, 2, padding=False)
    ids_TK[:] = 1

    def run() -> torch.Tensor:
        return reference.expert_outputs(x_TH, ids_TK, experts.addresses, spec)

    expected = run()
    for field in spec.layout.fields:
        sign = field.offset + field.nbytes - 1  # the last number's sign bit
        experts.records[1, sign] ^= 0x80
        assert not torch.equal(run(), expected), field.name
        experts.records[1, sign] ^= 0x80
    used = {f.offset + i for f in spec.layout.fields for i in range(f.nbytes)}
    for byte in set(range(spec.record_bytes)) - used:
        experts.records[1, byte] ^= 0xFF
    experts.records[0] = 0
    assert torch.equal(run(), expected)


def test_a_cpu_record_is_a_view_of_its_memory() -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    record = reference.read_record(memory.data_ptr(), 256, torch.device("cpu"))
    memory[200] = 9
    assert record[200] == 9


def test_reading_can_be_replaced() -> None:
    cpu = torch.device("cpu")
    experts = make_experts(3, hidden=5, intermediate=3, device=cpu)
    x_TH, ids_TK = make_inputs(experts, 4, 2)
    expected = reference.expert_outputs(x_TH, ids_TK, experts.addresses, experts.spec)
    asked = []

    def read(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
        asked.append((address, nbytes, device.type))
        return experts.records[address - 1]

    names = torch.arange(1, 4)  # any number but 0 may name a record
    got = reference.expert_outputs(x_TH, ids_TK, names, experts.spec, read_record=read)
    routed = sorted({int(e) for e in ids_TK.flatten() if 0 <= e < 3})
    assert asked == [(e + 1, experts.spec.record_bytes, "cpu") for e in routed]  # each once
    assert torch.equal(got, expected)
