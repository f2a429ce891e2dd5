"""MXFP4: FP4 codes and a power of two (E8M0) for 32 values of a row.

    W[n, k] = e2m1(c) * 2^(scale[n, k // 32] - 127)

c is the nibble k % 2 of byte k // 2, low first. Expert by expert as DeepSeek-V4 (`weight` int8,
`scale`) and compressed-tensors (`weight_packed`, `weight_scale`) publish it, or all experts of a
layer in one tensor as gpt-oss does (`gate_up_proj_blocks` [E, N, K / 32, 16], `_scales`
[E, N, K / 32]); gate and up rows alternate there, and an unquantised checkpoint has the
transpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from hotset.checkpoint.formats.base import Group, MatrixFormat, Naming, Tensors, expect, one_byte
from hotset.checkpoint.formats.bits import E2M1_MAX, e2m1, e8m0, nibbles_of_bytes
from hotset.checkpoint.quantised import Declared
from hotset.core.formats import MXFP4, WeightFormat

GROUP = 32

_FUSED = Naming("blocks", ("uint8",), ("scales",))
_DEEPSEEK = Naming("weight", ("int8", "uint8"), ("scale",))
_COMPRESSED = Naming("weight_packed", ("uint8",), ("weight_scale",))


@dataclass(frozen=True)
class Mxfp4(MatrixFormat):
    """See the module.

    Attributes:
        names: suffixes of codes and scales.
    """

    names: tuple[str, str]

    label = "MXFP4"
    namings = (_FUSED, _DEEPSEEK, _COMPRESSED)
    methods = (
        ("mxfp4", ""),
        ("fp8", ""),  # DeepSeek-V4: `expert_dtype` fp4 beside FP8
        ("compressed-tensors", "mxfp4"),
        ("compressed-tensors", "mixed-precision"),
    )

    @classmethod
    def recognise(cls, group: Group, declared: Declared | None) -> Self | None:
        naming = next(naming for naming in cls.namings if naming.fits(group))
        names = (naming.codes, naming.required[0])
        codes, scales = (group[name] for name in names)
        dtypes = ("uint8", "float8_e8m0fnu")
        if naming is _FUSED:
            expect(codes, (None, None, None, GROUP // 2))
            expect(scales, codes.shape[:3], dtypes)
            num_experts, rows, groups, _ = codes.shape
            return cls((num_experts, groups * GROUP, rows), names)
        expect(codes, (None, None))
        rows, columns = codes.shape[0], codes.shape[1] * 2
        expect(scales, (rows, -(-columns // GROUP)), dtypes)
        return cls((rows, columns), names)

    @classmethod
    def declared_weights(cls, declared: Declared) -> WeightFormat | None:
        if "mxfp4" in declared.name.lower() or declared.expert_dtype == "fp4":
            return MXFP4
        return None

    @property
    def weights(self) -> WeightFormat:
        return MXFP4

    @property
    def scale(self) -> str:
        return self.names[1]

    @property
    def is_transposed(self) -> bool:
        return len(self.shape) == 3

    @property
    def as_stored(self) -> Mapping[str, str]:
        # Of all experts in one tensor, the shape has the columns of a matrix before its rows.
        codes = {self.names[0]: ""} if self.shape[1] % 8 == 0 else {}
        return codes | {self.scale: "_scale"}

    def companions(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {"_scale": one_byte(tensors[self.scale])}

    def dequantise(self, tensors: Tensors) -> torch.Tensor:
        values = e2m1(nibbles_of_bytes(self._packed(tensors)))
        scales = e8m0(tensors[self.names[1]])
        return values * scales.repeat_interleave(GROUP, dim=1)[:, : values.shape[1]]

    def largest(self, tensors: Tensors) -> torch.Tensor:
        return e8m0(tensors[self.names[1]]) * E2M1_MAX

    def codes(self, tensors: Tensors) -> torch.Tensor:
        codes = self._packed(tensors)
        return torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4))

    def _packed(self, tensors: Tensors) -> torch.Tensor:
        """[N, K / 2] uint8."""
        codes = tensors[self.names[0]]
        return codes.view(torch.uint8).flatten(1)
