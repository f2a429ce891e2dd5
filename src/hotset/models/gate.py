"""Finds out which gate an experts module computes, by asking it.

The gate of a stock experts class is code (`_apply_gate`, `act_fn`), not data. Instead of a list of
class names, every form that the kernels know is tried on probe values with the constants that the
module carries; a form is taken only when it gives the module's own answer. Nothing is assumed, so
a new architecture with a known gate works unlisted, and one with an unknown gate is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from hotset.core.errors import CheckpointError
from hotset.core.geometry import Activation, Gate, GateForm
from hotset.kernels.reference import apply_gate

# From deep inside every clamp seen (7 to 10) to far outside, both signs, without exact zeros.
_PROBE = (-40.0, -11.0, -7.5, -3.0, -1.25, -0.4, -0.02, 0.03, 0.5, 1.1, 2.75, 6.5, 9.0, 12.5, 35.0)

# Both sides compute in FP32 and differ only in the order of a handful of operations and in the
# implementation of exp and erf: 64 ulp is generous for that, and the forms differ by percents.
_RTOL = 64 * torch.finfo(torch.float32).eps


def find_gate(module: nn.Module, *, name: str) -> Gate:
    """The gate of one experts module.

    Args:
        module: decorated by transformers' `use_experts_implementation`; its own parameters may be
            on the meta device or gone, only its gate code is run (FP32, on the CPU).
        name: its path, for the error.

    Raises:
        CheckpointError: no known form reproduces the module's own gate.
    """
    near = itertools.product(_PROBE, _PROBE)
    # Beyond every limit that the module may have, so that a clamp far out is not overlooked.
    far = [sign * 1.25 * value for value in _constants(module) for sign in (1, -1)]
    wide = itertools.chain(itertools.product(far, _PROBE), itertools.product(_PROBE, far))
    near_probe, wide_probe = _Probe(module, near), _Probe(module, wide)
    for gate in _candidates(module):
        if near_probe.agrees(gate) and wide_probe.agrees(gate):
            return gate
    raise CheckpointError(
        f"experts module `{name}` ({type(module).__name__}) computes a gate that no kernel knows",
        hint="known forms: " + ", ".join(form.value for form in GateForm),
    )


class _Probe:
    """Inputs, and what the module makes of them in FP32."""

    def __init__(self, module: nn.Module, pairs: Iterable[tuple[float, float]]) -> None:
        # [(g, u)]: one gate column, one up column, so that any layout is [g, u].
        halves = torch.tensor(list(pairs), dtype=torch.float32).reshape(-1, 2)
        self._inputs = halves if module.has_gate else halves[:, 1:]
        gate_code = module._apply_gate if module.has_gate else module.act_fn
        with torch.no_grad():
            self._want = gate_code(self._inputs)  # type: ignore[operator]

    def agrees(self, gate: Gate) -> bool:
        """Whether a gate of ours gives the same values."""
        got = apply_gate(self._inputs, gate)
        # Absolute as well: saturated exponentials differ in their last bits.
        return torch.allclose(got, self._want, rtol=_RTOL, atol=_RTOL)


def _constants(module: nn.Module) -> list[float]:
    """Plain numbers that the module, its children or its config carry and that may be a limit."""
    found: list[float] = []
    for owner in (*module.modules(), getattr(module, "config", None)):
        for value in vars(owner).values() if owner is not None else ():
            if isinstance(value, float | int) and not isinstance(value, bool) and 0 < value < 1e4:
                found.append(float(value))
    return list(dict.fromkeys(found))


def _candidates(module: nn.Module) -> Iterator[Gate]:
    if not module.has_gate:
        yield from (Gate(GateForm.NONE, act) for act in Activation)
        return
    yield from (Gate(GateForm.PLAIN, act) for act in Activation)
    constants = _constants(module)
    for limit in constants:
        for act in Activation:
            yield Gate(GateForm.CLAMPED, act, limit=limit)
            yield Gate(GateForm.CLAMPED_AFTER, act, limit=limit)
    for first, second in itertools.product(constants, repeat=2):
        yield Gate(GateForm.SWIGLU_OAI, limit=first, alpha=second)
        yield Gate(GateForm.SOFTCAPPED, gate_cap=first, up_cap=second)
