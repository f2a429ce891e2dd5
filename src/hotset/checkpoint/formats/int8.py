"""INT8: codes of 8 bits and a scale for each row, matrix, or group of a row, as compressed-tensors
writes them (W8A16, W8A8).

    W[n, k] = q[n, k] * scale[n, g(k)]

q is `weight` int8, or byte k % 4 of word k // 4 of `weight_packed` less 128, lowest first. Records
have no such codes: the weights are dequantised while loading, in 16 bits twice as large.
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
    expect,
    located,
    size_of,
)
from hotset.checkpoint.formats.bits import spread
from hotset.checkpoint.index import TensorEntry
from hotset.checkpoint.quantised import Declared
from hotset.core.errors import CheckpointError
from hotset.core.formats import PLAIN, WeightFormat

_OFFSET = 128
_PER_WORD = 4
_SCALE_DTYPES = ("bfloat16", "float16", "float32")

_CODES = Naming("weight", ("int8",), ("weight_scale",), ("input_scale",))
_PACKED = Naming("weight_packed", ("int32",), ("weight_scale",), ("weight_shape",))


@dataclass(frozen=True)
class Int8(MatrixFormat):
    """See the module.

    Attributes:
        codes_name: suffix of the codes, which tells whether they are packed.
    """

    codes_name: str

    label = "INT8"
    namings = (_CODES, _PACKED)
    methods = (
        ("compressed-tensors", "int-quantized"),
        ("compressed-tensors", "naive-quantized"),
        ("compressed-tensors", "pack-quantized"),
        ("compressed-tensors", "mixed-precision"),
    )
    unused = frozenset(("input_scale",))

    @classmethod
    def recognise(cls, group: Group, declared: Declared | None) -> Self | None:
        naming = _CODES if _CODES.fits(group) else _PACKED
        codes, scales = group[naming.codes], group["weight_scale"]
        expect(codes, (None, None))
        if naming is _PACKED and not _has_eight_bits(codes, scales, declared):
            return None
        expect(scales, scales.shape, _SCALE_DTYPES)
        rows, columns = codes.shape[0], codes.shape[1] * (_PER_WORD if naming is _PACKED else 1)
        _require_groups(scales, rows, columns)
        return cls((rows, columns), naming.codes)

    @classmethod
    def declared_weights(cls, declared: Declared) -> WeightFormat | None:
        widths = {(values.get("num_bits"), values.get("type")) for values in declared.weight_groups}
        return PLAIN if widths == {(8, "int")} else None

    @property
    def weights(self) -> WeightFormat:
        return PLAIN

    @property
    def scale(self) -> str:
        return "weight_scale"

    def codes(self, tensors: Tensors) -> torch.Tensor:
        raise AssertionError("no record holds INT8")

    def companions(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        raise AssertionError("no record holds INT8")

    def dequantise(self, tensors: Tensors) -> torch.Tensor:
        rows, columns = self.shape
        codes = tensors[self.codes_name]
        if self.codes_name == _PACKED.codes:
            codes = codes.contiguous().view(torch.uint8).int() - _OFFSET
        scales = tensors["weight_scale"].float()
        scales = scales.reshape(rows if scales.numel() > 1 else 1, -1)
        sizes = (rows // len(scales), columns // scales.shape[1])
        return codes.float() * spread(scales, sizes, (rows, columns))

    def largest(self, tensors: Tensors) -> torch.Tensor:
        return tensors["weight_scale"].float().abs() * (_OFFSET - 1)


def _has_eight_bits(codes: TensorEntry, scales: TensorEntry, declared: Declared | None) -> bool:
    """Whether words hold four codes and not eight: by the widths that a config speaks of and, of
    several, by the one whose groups are as many as the scales."""
    weights = declared.weight_groups if declared else ()
    widths = [values.get("num_bits") for values in weights]  # of any type, in a damaged config
    if all(width == 8 for width in widths):
        return bool(widths)
    num_groups = scales.shape[-1]

    def fits(width: int) -> bool:
        columns = codes.shape[1] * 32 // width
        sizes = [size_of(values) for values in weights if values.get("num_bits") == width]
        return any(-(-columns // (columns if size < 1 else size)) == num_groups for size in sizes)

    return fits(8) and not fits(4)


def _require_groups(scales: TensorEntry, rows: int, columns: int) -> None:
    one = torch.Size(scales.shape).numel() == 1
    by_row = scales.shape[:1] == (rows,) and len(scales.shape) <= 2
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    if not one and not (by_row and groups and columns % groups == 0):
        raise CheckpointError(
            f"{located(scales)} has shape {list(scales.shape)} for weights of {rows} x {columns}, "
            "expected one scale for each row, matrix, or group of equal size"
        )
