"""One expert's bytes: which fields lie where in its record.

Knows offsets and sizes, not values or devices.

A *record* holds everything of one expert side by side, so that it has one address and
moves as one copy. Every field starts at a multiple of `ALIGN_BYTES`, so that rows start on
full memory transactions wherever the record lies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

ALIGN_BYTES = 128

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
}


def align_up(value: int, to: int = ALIGN_BYTES) -> int:
    """The smallest multiple of `to` that is not below `value`."""
    return -(-value // to) * to


@dataclass(frozen=True)
class Field:
    """One tensor of a record, row-major.

    Attributes:
        name: `gate_up`, `down`, `gate_up_bias`, `down_bias`, ...
        shape: dimensions of this expert's tensor, without an expert dimension.
        dtype: a key of `DTYPE_BYTES`.
        offset: bytes from the start of the record.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class RecordLayout:
    """The fields of a record and its size, which is a multiple of `ALIGN_BYTES`."""

    fields: tuple[Field, ...]
    nbytes: int

    @classmethod
    def build(cls, specs: Iterable[tuple[str, tuple[int, ...], str]]) -> RecordLayout:
        """Lays fields out in the order given; each spec is (name, shape, dtype)."""
        fields, offset = [], 0
        for name, shape, dtype in specs:
            field = Field(name, tuple(shape), dtype, offset)
            fields.append(field)
            offset = align_up(offset + field.nbytes)
        return cls(tuple(fields), offset)

    def __contains__(self, name: object) -> bool:
        return any(field.name == name for field in self.fields)

    def field(self, name: str) -> Field:
        """The field of that name; `KeyError` when the record has none."""
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)
