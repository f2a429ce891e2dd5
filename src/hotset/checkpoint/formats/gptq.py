"""GPTQ: INT4 in groups along K, packed along K, with zero points.

    W[n, k] = (q[k, n] - z[g, n]) * scales[g, n],  g = g_idx[k], or k // size without it

q is the nibble k % 8 of word k // 8 of column n, z that of n % 8 of word n // 8, lowest first. The
first version of the format stores z - 1, the second z; configs name the version, but not all of
them rightly. Weights that the config calls symmetric have z = 8, so what is stored tells the
version; for others the config must.
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
from hotset.checkpoint.formats.int4 import (
    SCALE_DTYPES,
    SYMMETRIC_ZERO,
    checked_groups,
    column_order,
    missing,
)
from hotset.checkpoint.quantised import Declared
from hotset.core.errors import CheckpointError
from hotset.core.formats import WeightFormat, int4

# By `checkpoint_format`: what to add to a stored zero point.
_OFFSETS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True)
class Gptq(MatrixFormat):
    """See the module.

    Attributes:
        size: values along K that share a scale.
        symmetric: every zero point means 8.
        offset: what to add to a stored zero point; for symmetric weights what the config says.
        scale_dtype: theirs.
        ordered: columns of a group need not be neighbours (`desc_act`).
    """

    size: int
    scale_dtype: str
    symmetric: bool
    offset: int
    ordered: bool

    label = "INT4 of GPTQ"
    namings = (Naming("qweight", ("int32",), ("qzeros", "scales"), ("g_idx",)),)
    methods = (("gptq", ""),)

    @classmethod
    def recognise(cls, group: Group, declared: Declared | None) -> Self | None:
        codes, scales, zeros = group["qweight"], group["scales"], group["qzeros"]
        expect(codes, (None, None))
        expect(scales, (None, None), SCALE_DTYPES)
        if scales.shape[1] != codes.shape[1]:
            return None  # packed along N: AWQ
        columns, rows, groups = codes.shape[0] * 8, codes.shape[1], scales.shape[0]
        expect(zeros, (groups, -(-rows // 8)), ("int32",))
        if "g_idx" in group:
            expect(group["g_idx"], (columns,), ("int32", "int64"))
        if declared is None:
            raise CheckpointError(
                f"`{codes.name}` in `{codes.file}` is packed as GPTQ does, and no "
                "`quantization_config` says which version of it",
                hint="fetch the `config.json` that belongs to these files",
            )
        require_four_bits(declared)
        stated = declared.number("group_size")
        size = group_size(
            scales, columns=columns, groups=groups, declared=[] if stated is None else [stated]
        )
        symmetric = declared.flag("sym", default=True)
        ordered = declared.flag("desc_act", default=False)
        if ordered and "g_idx" not in group:
            raise missing(codes, "g_idx", f"`{declared.path}` says `desc_act` true")
        offset = _zero_offset(declared, symmetric=symmetric)
        return cls((rows, columns), size, scales.dtype, symmetric, offset, ordered)

    @classmethod
    def declared_weights(cls, declared: Declared) -> WeightFormat | None:
        return int4(
            "float16",
            group=declared_group(declared.number("group_size")),
            has_zeros=not declared.flag("sym", default=True),
            has_order=declared.flag("desc_act", default=False),
        )

    @property
    def weights(self) -> WeightFormat:
        return int4(
            self.scale_dtype,
            group=None if self.size == self.shape[1] else self.size,
            has_zeros=not self.symmetric,
            has_order=self.ordered,
        )

    @property
    def scale(self) -> str:
        return "scales"

    def codes(self, tensors: Tensors) -> torch.Tensor:
        # [K, N] codes first, so that columns are put in order as whole rows.
        codes = nibbles_of_words(tensors["qweight"], dim=0)
        if self.ordered:
            codes = codes[column_order(self.group_of_column(tensors), self.size)]
        return bytes_of_nibbles(codes.T)

    def companions(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        made = {"_scale": tensors["scales"].T}
        zeros = self.zero_points(tensors)  # looked at in any case: they may not be what was said
        if not self.symmetric:
            made["_zero"] = zeros
        group_K = self.group_of_column(tensors)
        if self.ordered:
            made["_order"] = column_order(group_K, self.size)
        elif not torch.equal(group_K, torch.arange(self.shape[1]) // self.size):
            raise CheckpointError(
                "`g_idx` puts columns in another order, and `quantization_config` says "
                "`desc_act` false",
                hint="set `desc_act` to true there if that is what they are",
            )
        return made

    def dequantise(self, tensors: Tensors) -> torch.Tensor:
        codes = nibbles_of_words(tensors["qweight"], dim=0).T.float()
        group_K = self.group_of_column(tensors)
        zeros, scales = self.zero_points(tensors).float(), tensors["scales"].float().T
        return (codes - zeros[:, group_K]) * scales[:, group_K]

    def largest(self, tensors: Tensors) -> torch.Tensor:
        return tensors["scales"].float().abs() * SYMMETRIC_ZERO

    def zero_points(self, tensors: Tensors) -> torch.Tensor:
        """[N, G] uint8, 0..16.

        Raises:
            CheckpointError: symmetric weights whose stored zero points are neither 7 nor 8.
        """
        stored = nibbles_of_words(tensors["qzeros"]).T[: self.shape[0]]
        if not self.symmetric:
            return stored + self.offset
        low, high = int(stored.min()), int(stored.max())
        if low != high or low not in (SYMMETRIC_ZERO - 1, SYMMETRIC_ZERO):
            raise CheckpointError(
                f"`quantization_config` calls the weights symmetric, and their zero points are "
                f"{low} to {high}, expected 7 (GPTQ) or 8 (GPTQ v2) everywhere",
                hint="set `sym` to false there if that is what they are",
            )
        return torch.full_like(stored, SYMMETRIC_ZERO)

    def group_of_column(self, tensors: Tensors) -> torch.Tensor:
        """[K] int64."""
        if "g_idx" in tensors:
            return checked_groups(tensors["g_idx"], -(-self.shape[1] // self.size))
        return torch.arange(self.shape[1]) // self.size


def _zero_offset(declared: Declared, *, symmetric: bool) -> int:
    """What to add to a stored zero point.

    Raises:
        CheckpointError: neither version is named, and the zero points do not tell which it is.
    """
    names = (declared.values.get(key) for key in ("checkpoint_format", "format"))
    said = str(next((name for name in names if name), "gptq"))
    offset = _OFFSETS.get(said.lower())
    if offset is None and not symmetric:
        raise CheckpointError(
            f"`{declared.path}` says `{said}`, which does not tell what stored zero points mean; "
            f"hotset reads {' and '.join(_OFFSETS)}",
            hint="name the one in `checkpoint_format` that the weights were written as",
        )
    return _OFFSETS["gptq"] if offset is None else offset


def require_four_bits(declared: Declared) -> None:
    """Requires that the config speaks of 4 bits, or of no width.

    Raises:
        CheckpointError: it says another.
    """
    bits = declared.number("bits", "w_bit")
    if bits not in (None, 4):
        raise CheckpointError(
            f"`{declared.path}` says `{declared.name}` with {bits} bits a value, hotset reads 4",
            hint="use a checkpoint with 4 bits, or in FP8",
        )
