"""What one fused experts parameter is, seen from a record.

Pure data between `models/`, which finds the parameters, and the loader, which fills the records.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"
