"""NVFP4: FP4 codes, an E4M3 scale for 16 values of a row, and one FP32 scale for the matrix.

    ModelOpt:            W[n, k] = e2m1(c) * (weight_scale[n, k // 16] * weight_scale_2)
    compressed-tensors:  W[n, k] = e2m1(c) * (weight_scale[n, k // 16] / weight_global_scale)

One multiplies where the other divides. c is the nibble k % 2 of byte k // 2, low first. Gate and up
of an expert have matrix scales of their own and need not agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from hotset.checkpoint.formats.base import Group, MatrixFormat, Naming, Tensors, expect, one_byte
from hotset.checkpoint.formats.bits import E2M1_MAX, e2m1, nibbles_of_bytes
from hotset.checkpoint.quantised import Declared
from hotset.core.formats import NVFP4, WeightFormat

GROUP = 16

_COMPRESSED = Naming(
    "weight_packed", ("uint8",), ("weight_scale", "weight_global_scale"), ("input_global_scale",)
)
_MODELOPT = Naming("weight", ("uint8",), ("weight_scale", "weight_scale_2"), ("input_scale",))


@dataclass(frozen=True)
class Nvfp4(MatrixFormat):
    """See the module.

    Attributes:
        codes_name: suffix of the codes, which tells the dialects apart.
    """

    codes_name: str

    unused = frozenset(("input_global_scale", "input_scale"))
    label = "NVFP4"
    namings = (_COMPRESSED, _MODELOPT)
    methods = (
        ("compressed-tensors", "nvfp4"),
        ("compressed-tensors", "mixed-precision"),
        ("modelopt", "FP4"),
        ("modelopt", "MIXED_PRECISION"),
        ("fp8", ""),  # NVIDIA's DeepSeek-V4 keeps the name of what it was made from
    )

    @classmethod
    def recognise(cls, group: Group, declared: Declared | None) -> Self | None:
        naming = _COMPRESSED if _COMPRESSED.fits(group) else _MODELOPT
        codes = group[naming.codes]
        expect(codes, (None, None))
        rows, columns = codes.shape[0], codes.shape[1] * 2
        expect(group["weight_scale"], (rows, -(-columns // GROUP)), ("float8_e4m3fn",))
        whole = group[naming.required[1]]
        expect(whole, (1,) if whole.shape else (), ("float32",))
        return cls((rows, columns), naming.codes)

    @classmethod
    def declared_weights(cls, declared: Declared) -> WeightFormat | None:
        names = f"{declared.name} {declared.values.get('moe_quant_algo') or ''}".lower()
        return NVFP4 if "nvfp4" in names else None

    @property
    def weights(self) -> WeightFormat:
        return NVFP4

    @property
    def divides(self) -> bool:
        return self.codes_name == _COMPRESSED.codes

    @property
    def scale(self) -> str:
        return "weight_scale"

    @property
    def as_stored(self) -> Mapping[str, str]:
        codes = {self.codes_name: ""} if self.shape[1] % 8 == 0 else {}
        whole = {} if self.divides else {"weight_scale_2": "_global"}
        return codes | whole | {self.scale: "_scale"}

    def companions(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {
            "_scale": one_byte(tensors["weight_scale"]),
            "_global": self.multiplier(tensors).reshape(-1),
        }

    def dequantise(self, tensors: Tensors) -> torch.Tensor:
        values = e2m1(nibbles_of_bytes(self._packed(tensors)))
        scales = tensors["weight_scale"].float()
        # In this order in both dialects, as their own libraries do.
        if self.divides:
            scales = scales / tensors["weight_global_scale"].reshape(())
        else:
            scales = scales * tensors["weight_scale_2"].reshape(())
        return values * scales.repeat_interleave(GROUP, dim=1)[:, : self.shape[1]]

    def largest(self, tensors: Tensors) -> torch.Tensor:
        return tensors["weight_scale"].float().abs() * self.multiplier(tensors).abs() * E2M1_MAX

    def codes(self, tensors: Tensors) -> torch.Tensor:
        codes = self._packed(tensors)
        return torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4))

    def _packed(self, tensors: Tensors) -> torch.Tensor:
        """[N, K / 2] uint8."""
        return tensors[self.codes_name]

    def multiplier(self, tensors: Tensors) -> torch.Tensor:
        """The matrix scale as a factor, float32."""
        if self.divides:
            return 1.0 / tensors["weight_global_scale"]
        return tensors["weight_scale_2"]
