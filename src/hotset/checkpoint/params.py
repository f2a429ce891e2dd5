"""What one fused experts parameter is, seen from a record.

Data between `models/`, which finds the parameters, and the loader, which fills the records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class ExpertParam:
    """One fused parameter that was taken out of the module tree, and where its rows go.

    Attributes:
        module: path of the experts module, e.g. `model.layers.3.mlp.experts`.
        name: the parameter's name in that module, e.g. `gate_up_proj`.
        layer: index of the MoE layer (into `ModelGeometry.layers`).
        field: record field that it fills: `up`, `down`, `up_bias` or `down_bias`.
        shape: the fused shape in the module, experts first: [E, 2I, H], [E, H, 2I], [E, H], ...
        transposed: a matrix is stored [in, out]; the record wants [out, in].
        interleaved: gate and up alternate along the output dimension; the record wants all gate
            rows, then all up rows. True only for the first projection and its bias.
    """

    module: str
    name: str
    layer: int
    field: str
    shape: tuple[int, ...]
    transposed: bool
    interleaved: bool

    def as_linear(self) -> ExpertParam:
        """The same experts as linear layers hold them: [E, out, in], all gate rows first."""
        shape = (self.shape[0], *self.shape[:0:-1]) if self.transposed else self.shape
        return replace(self, shape=shape, transposed=False, interleaved=False)

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"


def as_in_module(field: torch.Tensor, param: ExpertParam) -> torch.Tensor:
    """A record field seen in the order of the module's parameter: a view, without a copy.

    Args:
        field: [out, in] or [out], gate rows before up rows.
        param: how the module stores it.

    Returns:
        [out, in], or [in, out] when transposed; an interleaved output dimension of 2I becomes two
        of [I, 2], so that a contiguous tensor of the module's shape can be viewed likewise.
    """
    view = field.unflatten(0, (2, -1)).transpose(0, 1) if param.interleaved else field
    return view.movedim(-1, 0) if param.transposed else view
