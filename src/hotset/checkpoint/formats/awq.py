"""AWQ (its `gemm` layout): INT4 in groups along K, packed along N, with zero points.

    W[n, k] = (q[k, n] - z[k // size, n]) * scales[k // size, n]

Columns of a group of eight lie in a word in the order 0 2 4 6 1 3 5 7, lowest nibble first, in
`qweight` [K, N / 8] and `qzeros` [G, N / 8] alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from hotset.checkpoint.formats.base import (
    Group,
    MatrixFormat,
    Naming,
    Tensors,
    declared_group,
    expect,
    group_size,
)
from hotset.checkpoint.formats.bits import bytes_of_nibbles, nibbles_of_words
from hotset.checkpoint.formats.gptq import require_four_bits
from hotset.checkpoint.formats.int4 import SCALE_DTYPES, SYMMETRIC_ZERO
from hotset.checkpoint.quantised import Declared
from hotset.core.errors import CheckpointError
from hotset.core.formats import WeightFormat, int4

# Where column 0, 1, ... 7 of eight lies among the nibbles of its word.
_NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq(MatrixFormat):
    """See the module.

    Attributes:
        size: values along K that share a scale.
        scale_dtype: theirs.
    """

    size: int
    scale_dtype: str

    label = "INT4 of AWQ"
    namings = (Naming("qweight", ("int32",), ("qzeros", "scales")),)
    methods = (("awq", ""),)

    @classmethod
    def recognise(cls, group: Group, declared: Declared | None) -> Self | None:
        codes, scales, zeros = group["qweight"], group["scales"], group["qzeros"]
        expect(codes, (None, None))
        expect(scales, (None, None), SCALE_DTYPES)
        if scales.shape[1] != codes.shape[1] * 8:
            return None  # packed along K: GPTQ
        columns, rows, groups = codes.shape[0], codes.shape[1] * 8, scales.shape[0]
        expect(zeros, (groups, codes.shape[1]), ("int32",))
        stated = None
        if declared is not None:
            require_four_bits(declared)
            _require_gemm(declared)
            stated = declared.number("group_size", "q_group_size")
        size = group_size(
            scales, columns=columns, groups=groups, declared=[] if stated is None else [stated]
        )
        return cls((rows, columns), size, scales.dtype)

    @classmethod
    def declared_weights(cls, declared: Declared) -> WeightFormat | None:
        group = declared_group(declared.number("group_size", "q_group_size"))
        return int4("float16", group=group, has_zeros=True)

    @property
    def weights(self) -> WeightFormat:
        group = None if self.size == self.shape[1] else self.size
        return int4(self.scale_dtype, group=group, has_zeros=True)

    @property
    def scale(self) -> str:
        return "scales"

    def codes(self, tensors: Tensors) -> torch.Tensor:
        return bytes_of_nibbles(_columns(tensors["qweight"]).T)

    def companions(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {"_scale": tensors["scales"].T, "_zero": _columns(tensors["qzeros"]).T}

    def dequantise(self, tensors: Tensors) -> torch.Tensor:
        group_K = torch.arange(self.shape[1]) // self.size
        zeros, scales = _columns(tensors["qzeros"]).T.float(), tensors["scales"].float().T
        codes = _columns(tensors["qweight"]).T.float()
        return (codes - zeros[:, group_K]) * scales[:, group_K]

    def largest(self, tensors: Tensors) -> torch.Tensor:
        return tensors["scales"].float().abs() * SYMMETRIC_ZERO


def _columns(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] words to [..., 8 n] codes in the order of columns."""
    nibbles = nibbles_of_words(packed).unflatten(-1, (-1, 8))
    columns = [nibbles[..., place] for place in _NIBBLE_OF_COLUMN]
    return torch.stack(columns, dim=-1).flatten(-2)


def _require_gemm(declared: Declared) -> None:
    version = str(declared.values.get("version") or "gemm").lower()
    if version != "gemm":
        raise CheckpointError(
            f"`{declared.path}` says AWQ in its `{version}` layout, hotset reads `gemm`",
            hint="use a checkpoint that was written for it, or one of compressed-tensors",
        )
