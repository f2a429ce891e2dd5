"""Which kernels a device gets, what may be forced, and what is refused in words."""

from __future__ import annotations

import pytest
import torch

from hotset.core.errors import ConfigError
from hotset.kernels import device as device_functions
from hotset.kernels.dispatch import TritonKernels, select_kernels
from kernels.support import make_experts, make_inputs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def interpreted(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    monkeypatch.setattr(device_functions, "is_interpreted", lambda kernel: value)


def test_automatic_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch, False)
    assert select_kernels(CPU).name == "reference"
    assert select_kernels(CUDA).name == "triton"


def test_the_reference_can_be_forced_anywhere() -> None:
    assert select_kernels(CPU, "reference").name == "reference"
    assert select_kernels(CUDA, "reference").name == "reference"


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch, True)
    assert select_kernels(CPU, "triton").name == "triton"
    interpreted(monkeypatch, False)
    with pytest.raises(ConfigError, match="cannot run on the device `cpu`") as caught:
        select_kernels(CPU, "triton")
    assert "TRITON_INTERPRET=1" in str(caught.value.hint)


def test_the_interpreter_is_refused_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch, True)
    with pytest.raises(ConfigError, match="`TRITON_INTERPRET` is set"):
        select_kernels(CUDA)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="no kernels called `cutlass`") as caught:
        select_kernels(CPU, "cutlass")
    assert "reference, triton" in str(caught.value.hint)


def test_a_broken_contract_is_our_bug() -> None:
    experts = make_experts(2, hidden=16, intermediate=8)
    x_TH, ids_TK = make_inputs(experts, 3, 2)
    address_E, spec = experts.addresses, experts.spec
    for wrong in (x_TH.half(), x_TH[:, :8], x_TH[:2]):
        with pytest.raises(AssertionError):
            TritonKernels().expert_outputs(wrong, ids_TK, address_E, spec)
    with pytest.raises(AssertionError):
        TritonKernels().expert_outputs(x_TH, ids_TK, address_E.int(), spec)
