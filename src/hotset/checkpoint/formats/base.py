"""What a published format of a quantised matrix is: the pieces that one file per format fills in.

A *group* is all tensors of one matrix: codes and what belongs to them (scales, zero points, ...),
told apart by the ends of their names, their *suffixes*. A `MatrixFormat` is what is known of one
group from names, dtypes and shapes. It knows nothing of experts, records' layout or files' bytes.

Letters: N rows (out) and K columns (in) of the matrix that is multiplied with, G groups along K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from hotset.checkpoint.index import TensorEntry
from hotset.checkpoint.quantised import Declared
from hotset.core.errors import CheckpointError
from hotset.core.formats import WeightFormat

# suffix -> tensor of one matrix, in the headers and read
Group = Mapping[str, TensorEntry]
Tensors = Mapping[str, torch.Tensor]

# Suffix of the codes of all experts in one tensor, which has the name of the parameter itself.
UNNAMED = "(codes)"

# Scales are kept for whole 32-bit words of codes.
GROUP_MULTIPLE = 8


@dataclass(frozen=True)
class Naming:
    """Suffixes of one dialect of a format.

    Attributes:
        codes: of the tensor that holds the codes, and the dtypes that it may have.
        dtypes: the latter, as `TensorEntry` spells them.
        required: suffixes that must be beside it.
        optional: suffixes that may be beside it.
    """

    codes: str
    dtypes: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def suffixes(self) -> frozenset[str]:
        return frozenset((self.codes, *self.required, *self.optional))

    def fits(self, group: Group) -> bool:
        """Whether these are exactly the tensors of such a matrix."""
        return (
            self.begins(group)
            and group.keys() <= self.suffixes
            and group.keys() >= {*self.required}
        )

    def begins(self, group: Group) -> bool:
        """Whether the codes are there, whatever else is."""
        return self.codes in group and group[self.codes].dtype in self.dtypes


@dataclass(frozen=True)
class MatrixFormat(ABC):
    """How the files hold one matrix of [N, K], or those of all experts of a layer in one tensor.

    Attributes:
        shape: of the weight that it stands for, as an unquantised checkpoint has it.
    """

    shape: tuple[int, ...]

    # What messages call it, how its dialects are named, and what configs may call it: pairs of a
    # `quant_method` and a word that its full name must contain.
    label: ClassVar[str]
    namings: ClassVar[tuple[Naming, ...]]
    methods: ClassVar[tuple[tuple[str, str], ...]]
    # Suffixes of scales of activations: for hardware that multiplies in few bits.
    unused: ClassVar[frozenset[str]] = frozenset()
    # Suffix of a tensor that holds nothing but the numbers of `shape`.
    says_shape: ClassVar[str | None] = None
    # What half of the scales allow weights to be at most. Scales are made for groups with largest
    # weights of 0.01 to 1; inverted ones of codes up to c allow c^2 over that.
    most_typical: ClassVar[float] = 64.0

    @classmethod
    @abstractmethod
    def recognise(cls, group: Group, declared: Declared | None) -> Self | None:
        """The format of a group that one of `namings` fits; `None` when it is another format's.

        Raises:
            CheckpointError: it is of this format, but shapes or dtypes do not go together.
        """

    @classmethod
    @abstractmethod
    def declared_weights(cls, declared: Declared) -> WeightFormat | None:
        """How records would hold what a config of one of `methods` speaks of, as far as it says.

        For a plan before any tensor is seen; `None` when it speaks of another format.
        """

    @property
    @abstractmethod
    def weights(self) -> WeightFormat:
        """How a record holds it; of a matrix that is its own half or two halves alike."""

    @property
    @abstractmethod
    def scale(self) -> str:
        """Suffix of the scales."""

    @property
    def is_transposed(self) -> bool:
        """Whether, of all experts in one tensor, `shape` has the columns before the rows."""
        return False

    @property
    def divides(self) -> bool:
        """Whether a scale divides, so that a record's reciprocal may differ in the last bit."""
        return False

    @property
    def as_stored(self) -> Mapping[str, str]:
        """Tensors whose bytes are a record's as they stand in the file: suffix -> what follows the
        matrix's name in the field's, nothing for codes. The others are made by `codes` and
        `companions`."""
        return {}

    @abstractmethod
    def codes(self, tensors: Tensors) -> torch.Tensor:
        """The record's rows of codes, [N, row bytes] uint8."""

    @abstractmethod
    def companions(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """What else the record holds of this half, by what follows its name in a field's.

        `_scale` [blocks, groups], `_zero` likewise, `_global` [1] float32, `_order` [K] int32; see
        `WeightFormat.fields`. Where single scales of n matrices are given one below the other,
        `_global` is [n].

        Raises:
            CheckpointError: values that do not go together.
        """

    @abstractmethod
    def dequantise(self, tensors: Tensors) -> torch.Tensor:
        """The matrix by the published formula, [N, K] float32: the specification.

        Args:
            tensors: of one matrix; of a group that holds all experts the slice of one.
        """

    @abstractmethod
    def largest(self, tensors: Tensors) -> torch.Tensor:
        """The largest magnitude that each scale lets its values have, float32.

        Element by element of the scales, so that samples of several matrices can be given, one
        below the other; single scales of whole matrices are then below each other too, [n, 1].
        """


def expect(entry: TensorEntry, shape: Iterable[int | None], dtypes: Iterable[str] = ()) -> None:
    """Requires a shape, with `None` for any size, and one of some dtypes, where given.

    Raises:
        CheckpointError: names tensor, file, and what was expected.
    """
    want, dtypes = tuple(shape), tuple(dtypes)
    fits = len(want) == len(entry.shape) and all(
        size in (None, have) for size, have in zip(want, entry.shape, strict=True)
    )
    if not fits:
        text = ", ".join("any" if size is None else str(size) for size in want)
        raise CheckpointError(f"{located(entry)} has shape {list(entry.shape)}, expected [{text}]")
    if dtypes and entry.dtype not in dtypes:
        raise CheckpointError(f"{located(entry)} is {entry.dtype}, expected {' or '.join(dtypes)}")


def located(entry: TensorEntry) -> str:
    """A tensor and its file, for messages."""
    return f"tensor `{entry.name}` in `{entry.file}`"


def group_size(scales: TensorEntry, *, columns: int, groups: int, declared: Iterable[int]) -> int:
    """Values along K that share a scale.

    Declared sizes are preferred: the ratio of K and G misleads where the last group is partial.

    Args:
        scales: for messages.
        columns: K.
        groups: G, as the scales have it.
        declared: sizes that the config speaks of; -1 is one group for all of K.

    Raises:
        CheckpointError: none of them gives G groups, or without any K is no multiple of G.
    """
    sizes = [columns if size < 1 else size for size in declared]
    if not sizes and groups and columns % groups == 0:
        sizes = [columns // groups]
    for size in sizes:
        if -(-columns // size) == groups and (size == columns or size % GROUP_MULTIPLE == 0):
            return size
    said = f"by groups of {' or '.join(map(str, sizes))}" if sizes else "by equal groups"
    raise CheckpointError(
        f"{located(scales)} has {groups} scales for rows of {columns} values, which is not {said}",
        hint=f"groups must be multiples of {GROUP_MULTIPLE} values, or whole rows",
    )


def size_of(weights: Mapping[str, object]) -> int:
    """The group size of one of compressed-tensors' `weights`; -1 is whole rows.

    Raises:
        CheckpointError: it is no number.
    """
    size = weights.get("group_size")
    if size is None:
        return -1
    if not isinstance(size, int) or isinstance(size, bool):
        raise CheckpointError(
            f"`quantization_config` has a `group_size` of `{size!r}`, expected a whole number",
            hint="fetch the `config.json` that belongs to these files",
        )
    return size or -1


def declared_group(size: object) -> int | None:
    """A group size as a config says it; `None` for whole rows.

    Raises:
        CheckpointError: no record could hold it.
    """
    if not isinstance(size, int) or size < 1:
        return None
    if size % GROUP_MULTIPLE:
        raise CheckpointError(
            f"`quantization_config` speaks of groups of {size} values, hotset reads multiples of "
            f"{GROUP_MULTIPLE}"
        )
    return size


def one_byte(scales: torch.Tensor) -> torch.Tensor:
    """Scales as a record keeps them: those of one byte by their bits."""
    return scales.view(torch.uint8) if scales.itemsize == 1 else scales
