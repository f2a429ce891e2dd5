"""Gates are found by asking the module: all forms, all activations, all installed classes."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.nn import functional

from hotset.core.errors import CheckpointError
from hotset.core.geometry import Activation, Gate, GateForm
from hotset.kernels.reference import apply_gate
from hotset.models.gate import find_gate

MODELS = Path(transformers.__file__).parent / "models"

# Written out by hand: the kernels' own `activate` must not be its own witness.
ACTIVATIONS = {
    Activation.SILU: lambda x: x / (1 + torch.exp(-x)),
    Activation.GELU: lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    Activation.GELU_TANH: lambda x: (
        0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ),
    Activation.RELU: lambda x: x.clamp(min=0),
    Activation.RELU2: lambda x: x.clamp(min=0) ** 2,
}


class Experts(nn.Module):
    """An experts module that is nothing but its gate code and the numbers that it carries."""

    def __init__(self, gate_code: Any, *, has_gate: bool = True, **numbers: float) -> None:
        super().__init__()
        self.has_gate = has_gate
        self.act_fn = gate_code
        self._apply_gate = lambda gate_up: gate_code(*gate_up.chunk(2, dim=-1))
        # Numbers that have nothing to do with the gate, as every module has.
        self.config = SimpleNamespace(
            hidden_size=2880, num_experts=32, rms_norm_eps=1e-5, **numbers
        )


@pytest.mark.parametrize("activation", Activation)
def test_plain_gates_of_every_activation(activation: Activation) -> None:
    act = ACTIVATIONS[activation]
    found = find_gate(Experts(lambda g, u: act(g) * u), name="x")
    assert found == Gate(GateForm.PLAIN, activation)
    found = find_gate(Experts(act, has_gate=False), name="x")
    assert found == Gate(GateForm.NONE, activation)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("limit", [0.5, 7.0, 10.0, 50.0, 1000.0])
def test_clamps_before_and_after_the_activation(activation: Activation, limit: float) -> None:
    """A limit beyond the probe values is no reason to overlook the clamp."""
    act = ACTIVATIONS[activation]

    def before(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return act(g.clamp(max=limit)) * u.clamp(-limit, limit)

    def after(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return act(g).clamp(max=limit) * u.clamp(-limit, limit)

    forms = {before: GateForm.CLAMPED, after: GateForm.CLAMPED_AFTER}
    pairs = limit * torch.linspace(-2.5, 2.5, 61)
    halves = torch.cartesian_prod(pairs, pairs)
    for gate_code, form in forms.items():
        found = find_gate(Experts(gate_code, swiglu_limit=limit), name="x")
        assert found.limit == limit
        assert found == Gate(form, activation, limit=limit) or is_one_function(act, limit)
        want = gate_code(*halves.chunk(2, dim=-1))
        # The two sides differ in the order of a few operations only.
        torch.testing.assert_close(apply_gate(halves, found), want, rtol=1e-5, atol=1e-5)


def is_one_function(act: Any, limit: float) -> bool:
    """Whether clamping before and after the activation cannot be told apart in FP32."""
    above = torch.linspace(limit, 4 * limit, 100)
    return bool(torch.allclose(act(above).clamp(max=limit), act(torch.tensor(limit)), rtol=1e-5))


@pytest.mark.parametrize(("limit", "alpha"), [(7.0, 1.702), (3.0, 1.0), (60.0, 1.702)])
def test_the_gate_of_gpt_oss(limit: float, alpha: float) -> None:
    def gate_code(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        g = g.clamp(max=limit)
        return (u.clamp(-limit, limit) + 1) * g * torch.sigmoid(alpha * g)

    module = Experts(gate_code, swiglu_limit=limit, swiglu_alpha=alpha)
    assert find_gate(module, name="x") == Gate(GateForm.SWIGLU_OAI, limit=limit, alpha=alpha)


def test_soft_caps() -> None:
    def gate_code(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * (25 * torch.tanh(u / 25))

    module = Experts(gate_code, gate_softcap=4.0, up_softcap=25.0)
    assert find_gate(module, name="x") == Gate(GateForm.SOFTCAPPED, gate_cap=4.0, up_cap=25.0)


@pytest.mark.parametrize(
    "gate_code",
    [
        lambda g, u: torch.tanh(g) * u,
        lambda g, u: functional.silu(u) * g,  # the halves the other way round
        lambda g, u: functional.silu(g) * u * 1.001,
        lambda g, u: functional.silu(g) * (u + 1),
        lambda g, u: functional.silu(1.702 * g) * u,
        lambda g, u: functional.silu(g.clamp(-7, 7)) * u,
        lambda g, u: functional.silu(g.clamp(max=500)) * u,  # a limit that the module does not tell
    ],
)
def test_an_unknown_gate_is_refused(gate_code: Any) -> None:
    """The control: nothing is taken for what it only resembles."""
    module = Experts(gate_code, swiglu_limit=7.0)
    with pytest.raises(CheckpointError, match=r"`layers\.3\.experts` .* no kernel knows") as caught:
        find_gate(module, name="layers.3.experts")
    assert "swiglu_oai" in (caught.value.hint or "")


def installed_classes() -> Iterator[tuple[str, str]]:
    """(architecture, class) of every experts class on the library's interface."""
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        source = file.read_text(encoding="utf-8")
        for name in re.findall(r"@use_experts_implementation[^\n]*\nclass (\w+)", source):
            yield file.parent.name, name


# What is not `silu(gate) * up`.
OTHER_GATES = {
    "deepseek_v4": Gate(GateForm.CLAMPED, limit=10.0),
    "diffusion_gemma": Gate(GateForm.PLAIN, Activation.GELU_TANH),
    "gemma4": Gate(GateForm.PLAIN, Activation.GELU_TANH),
    "glm5_next": Gate(GateForm.CLAMPED, limit=10.0),
    "gpt_oss": Gate(GateForm.SWIGLU_OAI, limit=7.0, alpha=1.702),
    "hy_v4": Gate(GateForm.CLAMPED, limit=10.0),
    "inkling2": Gate(GateForm.SOFTCAPPED, gate_cap=4.0, up_cap=25.0),
    "minimax_m3_vl": Gate(GateForm.SWIGLU_OAI, limit=7.0, alpha=1.702),
    "nemotron_h": Gate(GateForm.NONE, Activation.RELU2),
    "openai_privacy_filter": Gate(GateForm.SWIGLU_OAI, limit=7.0, alpha=1.702),
}

# Fields that have no default, or none that one layer can be built from.
FIELDS = {
    "diffusion_gemma": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 16]},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "gemma4": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize(("architecture", "name"), list(installed_classes()))
def test_every_installed_experts_class(architecture: str, name: str) -> None:
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    experts = build_experts(getattr(module, name), architecture)
    gate = find_gate(experts, name=name)
    assert gate == OTHER_GATES.get(architecture, Gate(GateForm.PLAIN, Activation.SILU))


def build_experts(cls: type[nn.Module], architecture: str) -> nn.Module:
    """An experts module on the meta device, from the defaults of whichever config it takes."""
    configs = importlib.import_module(
        f"transformers.models.{architecture}.configuration_{architecture}"
    )
    failures = []
    for config in vars(configs).values():
        is_config = isinstance(config, type) and issubclass(config, transformers.PretrainedConfig)
        if not is_config or not config.__module__.startswith(configs.__name__):
            continue
        try:
            values = config(**FIELDS.get(architecture, {}))
            values.allow_global_per_layer_attribute_access = True  # sizes may differ by layer
            # One model has a list, for its text and its vision experts, and a size beside it.
            sizes = getattr(values, "moe_intermediate_size", None)
            extra = (sizes[0],) if isinstance(sizes, list) else ()
            with torch.device("meta"):
                return cls(values, *extra)
        except (AttributeError, TypeError, ValueError, StrictDataclassError) as error:
            failures.append(f"{config.__name__}: {error}")
    raise AssertionError(failures)
