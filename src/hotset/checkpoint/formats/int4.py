"""INT4 in groups along K as compressed-tensors packs it (`pack-quantized`).

    W[n, k] = (u[n, k] - z[n, g(k)]) * scale[n, g(k)],  g(k) = k // size, or weight_g_idx[k]

u is the nibble k % 8 of word k // 8 of a row, lowest first; z is 8 for symmetric weights, else the
nibble n % 8 of word n // 8 of a column of `weight_zero_point` (packed along N).
"""

from __future__ import annotations

from collections.abc import Mapping
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
    located,
    size_of,
)
from hotset.checkpoint.formats.bits import bytes_of_nibbles, nibbles_of_words
from hotset.checkpoint.index import TensorEntry
from hotset.checkpoint.quantised import Declared
from hotset.core.errors import CheckpointError
from hotset.core.formats import WeightFormat, int4

SYMMETRIC_ZERO = 8
SCALE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Int4(MatrixFormat):
    """See the module.

    Attributes:
        size: values along K that share a scale.
        scale_dtype: theirs.
        zeros: zero points are stored.
        ordered: `weight_g_idx` is there, so groups need not be neighbours.
    """

    size: int
    scale_dtype: str
    zeros: bool
    ordered: bool

    label = "INT4 of compressed-tensors"
    namings = (
        Naming(
            "weight_packed",
            ("int32",),
            ("weight_scale",),
            ("weight_shape", "weight_zero_point", "weight_g_idx"),
        ),
    )
    methods = (("compressed-tensors", "pack-quantized"), ("compressed-tensors", "mixed-precision"))
    says_shape = "weight_shape"

    @classmethod
    def recognise(cls, group: Group, declared: Declared | None) -> Self | None:
        codes, scales = group["weight_packed"], group["weight_scale"]
        expect(codes, (None, None))
        rows, columns = codes.shape[0], codes.shape[1] * 8
        expect(scales, (rows, None), SCALE_DTYPES)
        weights = declared.weight_groups if declared else ()
        _refuse_other_widths(codes, weights)
        _require_companions(group, [values for values in weights if values.get("num_bits") == 4])
        groups = scales.shape[1]
        if "weight_zero_point" in group:
            expect(group["weight_zero_point"], (-(-rows // 8), groups), ("int32",))
        if "weight_g_idx" in group:
            expect(group["weight_g_idx"], (columns,), ("int32", "int64"))
        sizes = [size_of(values) for values in weights]
        size = group_size(scales, columns=columns, groups=groups, declared=sizes)
        zeros, ordered = "weight_zero_point" in group, "weight_g_idx" in group
        return cls((rows, columns), size, scales.dtype, zeros, ordered)

    @classmethod
    def declared_weights(cls, declared: Declared) -> WeightFormat | None:
        for weights in declared.weight_groups:
            if weights.get("num_bits") == 4 and weights.get("type") == "int":
                symmetric = weights.get("symmetric") is not False
                ordered = weights.get("actorder") == "group"
                group = declared_group(weights.get("group_size"))
                return int4("bfloat16", group=group, has_zeros=not symmetric, has_order=ordered)
        return None

    @property
    def weights(self) -> WeightFormat:
        group = None if self.size == self.shape[1] else self.size
        return int4(self.scale_dtype, group=group, has_zeros=self.zeros, has_order=self.ordered)

    @property
    def scale(self) -> str:
        return "weight_scale"

    @property
    def as_stored(self) -> Mapping[str, str]:
        codes = {} if self.ordered else {"weight_packed": ""}
        return codes | {self.scale: "_scale"}

    def codes(self, tensors: Tensors) -> torch.Tensor:
        packed = tensors["weight_packed"]
        if not self.ordered:
            return packed.view(torch.uint8)
        codes = nibbles_of_words(packed)
        return bytes_of_nibbles(codes[:, column_order(self.group_of_column(tensors), self.size)])

    def companions(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        check_shape(tensors, self.shape)
        made = {"_scale": tensors["weight_scale"]}
        if self.zeros:
            made["_zero"] = self.zero_points(tensors)
        if self.ordered:
            made["_order"] = column_order(self.group_of_column(tensors), self.size)
        return made

    def dequantise(self, tensors: Tensors) -> torch.Tensor:
        codes = nibbles_of_words(tensors["weight_packed"]).float()
        group_K = self.group_of_column(tensors)
        zeros = self.zero_points(tensors).float()
        return (codes - zeros[:, group_K]) * tensors["weight_scale"].float()[:, group_K]

    def largest(self, tensors: Tensors) -> torch.Tensor:
        # Half of the codes' range, which is what a zero point in the middle leaves.
        return tensors["weight_scale"].float().abs() * SYMMETRIC_ZERO

    def zero_points(self, tensors: Tensors) -> torch.Tensor:
        """[N, G], 0..15."""
        if self.zeros:
            packed = tensors["weight_zero_point"]
            return nibbles_of_words(packed, dim=0)[: self.shape[0]]
        return torch.full(tensors["weight_scale"].shape, SYMMETRIC_ZERO, dtype=torch.uint8)

    def group_of_column(self, tensors: Tensors) -> torch.Tensor:
        """[K] int64."""
        sequential = torch.arange(self.shape[1]) // self.size
        # The library's own writer leaves -1 where nothing was reordered.
        if not self.ordered or bool((tensors["weight_g_idx"] == -1).all()):
            return sequential
        return checked_groups(tensors["weight_g_idx"], -(-self.shape[1] // self.size))


def checked_groups(group_K: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Groups of columns as the file has them, [K] int64.

    Raises:
        CheckpointError: one that has no scale.
    """
    low, high = int(group_K.min()), int(group_K.max())
    if low < 0 or high >= num_groups:
        raise CheckpointError(
            f"`g_idx` names groups {low} to {high}, and there are {num_groups}",
            hint="the file is damaged: download it again",
        )
    return group_K.long()


def column_order(group_K: torch.Tensor, size: int) -> torch.Tensor:
    """Columns in an order in which those of a group are neighbours, [K] int32.

    Args:
        group_K: group of each column.
        size: columns of a group; the last group may have fewer.

    Raises:
        CheckpointError: groups of other sizes.
    """
    order = torch.argsort(group_K, stable=True)
    if not torch.equal(group_K[order], torch.arange(len(group_K)) // size):
        raise CheckpointError(
            f"`g_idx` does not make groups of {size} columns",
            hint="the file is damaged, or `group_size` in `quantization_config` is wrong",
        )
    return order.int()


def check_shape(tensors: Tensors, shape: tuple[int, ...]) -> None:
    """Requires that `weight_shape`, if it is there, says what the codes hold.

    Raises:
        CheckpointError: it says something else.
    """
    said = tensors.get("weight_shape")
    if said is not None and tuple(said.tolist()) != shape:
        raise CheckpointError(
            f"`weight_shape` says {said.tolist()}, the codes are those of {list(shape)}",
            hint="rows must be whole words of eight values",
        )


def missing(codes: TensorEntry, suffix: str, promise: str) -> CheckpointError:
    """The error of codes without a companion that the config promises."""
    return CheckpointError(
        f"{located(codes)} has no `{suffix}`, and {promise}",
        hint="the tensor is missing: download the checkpoint again",
    )


def _require_companions(group: Group, weights: list[Mapping[str, object]]) -> None:
    """Requires what all of the config's groups of 4 bits say that there is: without it, zero points
    would be taken for 8, and columns for those of their place.

    Raises:
        CheckpointError: it is missing.
    """
    asymmetric = [values.get("symmetric") is False for values in weights]
    ordered = [values.get("actorder") in ("group", "dynamic") for values in weights]
    needed = {
        "weight_zero_point": ("`symmetric` false", asymmetric),
        "weight_g_idx": ("`actorder` group", ordered),
    }
    for suffix, (words, said) in needed.items():
        if said and all(said) and suffix not in group:
            raise missing(group["weight_packed"], suffix, f"`quantization_config` says {words}")


def _refuse_other_widths(codes: TensorEntry, weights: tuple[Mapping[str, object], ...]) -> None:
    widths = [values.get("num_bits") for values in weights]  # of any type, in a damaged config
    if widths and 4 not in widths:
        bits = " and ".join(sorted({repr(width) for width in widths}))
        raise CheckpointError(
            f"{located(codes)} is packed with {bits} bits a value, hotset reads 4",
            hint="use a W4A16 or an FP8 checkpoint of this model",
        )
