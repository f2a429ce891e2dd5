"""Device functions that read a matrix of a record, plain or quantised, as a tile of weights.

Where codes and scales of a matrix lie, and a tile of its weights as the kernels for many tokens
multiply them; what a code is worth is known to `codes`. Knows one matrix and one tile; nothing of
experts, tokens or grids.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import triton
import triton.language as tl

from hotset.core.formats import CODES_PER_WORD, WORD_BYTES
from hotset.core.geometry import ExpertSpec
from hotset.core.record import ALIGN_BYTES
from hotset.kernels.codes import decode_e4m3, decode_e8m0, pair_factors, weights_of_pair
from hotset.kernels.device import field_pointer, load_weights

_SCALE_TYPES = {
    "": tl.uint8,
    "float32": tl.float32,
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float8_e4m3fn": tl.uint8,
    "float8_e8m0fnu": tl.uint8,
}
ABSENT = -1


@dataclass(frozen=True)
class Matrix(dict[str, Any]):
    """One matrix of a record as kernels know it when they are compiled.

    A dictionary of its attributes as well: Triton gives what a kernel is compiled for to whoever
    watches it compile (vLLM does) as JSON, which knows no class of ours.

    Attributes:
        codes: `plain`, `fp8`, `int4`, `fp4` or `lossless`.
        per_word: codes of a 32-bit word; 1 where plain, and where `lossless` makes it plain.
        columns: K.
        half_rows: N of a half.
        row_words: words from one row of codes to the next; of `lossless` groups of 8 columns.
        scale_codes: `float8_e4m3fn`, `float8_e8m0fnu`, or a number's dtype.
        group, block: columns and rows of a half that share a scale.
        num_groups, num_blocks: how many of them.
        offset, scale, zero, factor, order: bytes into the record; `ABSENT` for none.
        exponent, row, rare: the same, of `lossless`.
        row_rare, rare_places: places of its table for a row, and the power of two above.
        stride: rows of a tile are so many apart; only the packed kernels of one token know others
            than 1, where that makes all rows of a tile begin at the same place of a line.
    """

    codes: str
    per_word: int
    columns: int
    half_rows: int
    row_words: int
    scale_codes: str
    group: int
    block: int
    num_groups: int
    num_blocks: int
    offset: int
    scale: int
    zero: int
    factor: int
    order: int
    exponent: int = ABSENT
    row: int = ABSENT
    rare: int = ABSENT
    row_rare: int = 0
    rare_places: int = 0
    stride: int = 1

    def __post_init__(self) -> None:
        super().update(vars(self))

    @property
    def scale_type(self) -> tl.dtype:
        """What a scale is loaded as."""
        return _SCALE_TYPES[self.scale_codes]

    @property
    def scale_is_bfloat16(self) -> bool:
        """Whether BF16 holds what a code is multiplied by."""
        codes = ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu")
        return self.scale_codes in codes and self.factor == ABSENT

    @property
    def reads_bytes(self) -> bool:
        """Whether scales or zero points are loaded as single bytes."""
        return self.scale_type is tl.uint8 or self.zero != ABSENT

    @property
    def line_period(self) -> int:
        """Rows from one that begins at some place of a line to the next that does; 1 where rows
        are whole lines, or where both halves or 16-byte reads would not begin alike."""
        line_words = ALIGN_BYTES // WORD_BYTES
        period = line_words // gcd(self.row_words, line_words)
        alike = self.half_rows % period == 0 and self.row_words % 4 == 0
        return period if alike and self.order == ABSENT else 1

    @classmethod
    def of(cls, spec: ExpertSpec, name: str) -> Matrix:
        """The matrix `up` or `down` of an expert."""
        is_up = name == "up"
        form = spec.up_format if is_up else spec.down_format
        columns = spec.hidden if is_up else spec.intermediate
        rows = spec.intermediate if is_up else spec.hidden
        offset = {field.name: field.offset for field in spec.layout.fields}
        row_rare = spec.layout.field(f"{name}_rare").shape[1] if form.is_lossless else 0
        return cls(
            codes="fp4" if form.name in ("nvfp4", "mxfp4") else form.name,
            per_word=1 if form.is_plain or form.is_lossless else CODES_PER_WORD[form.name],
            columns=columns,
            half_rows=rows,
            row_words=columns if form.is_plain else form.row_words(columns),
            scale_codes=form.scale_dtype,
            group=form.scale_columns or columns,
            block=form.scale_rows or rows,
            num_groups=form.num_groups(columns),
            num_blocks=form.num_blocks(rows),
            offset=offset[name],
            scale=offset.get(f"{name}_scale", ABSENT),
            zero=offset.get(f"{name}_zero", ABSENT),
            factor=offset.get(f"{name}_global", ABSENT),
            order=offset.get(f"{name}_order", ABSENT),
            exponent=offset.get(f"{name}_exponent", ABSENT),
            row=offset.get(f"{name}_row", ABSENT),
            rare=offset.get(f"{name}_rare", ABSENT),
            row_rare=row_rare,
            rare_places=triton.next_power_of_2(row_rare),
        )


@triton.jit
def _load_owned(source, target, offsets, inside, owned, fill, FILL: tl.constexpr):
    """Values that several tiles read; the tile that owns one also fills it."""
    values = tl.load(source + offsets, mask=inside, other=0)
    if FILL:  # noqa: SIM102 (known when compiled; the inner one is not)
        if fill != 0:
            tl.store(target + offsets, values, mask=inside & owned)
    return values


@triton.jit
def decoded_scales(scale, M: tl.constexpr):
    """Scales as they lie in a record to FP32."""
    if M.scale_codes == "float8_e4m3fn":
        scale = decode_e4m3(scale)
    elif M.scale_codes == "float8_e8m0fnu":
        scale = decode_e8m0(scale)
    else:
        scale = scale.to(tl.float32)
    return scale


@triton.jit
def _load_scales(record, fill, rows, words, inside, exists, M: tl.constexpr, FILL: tl.constexpr):
    """FP32 scale of each word [ROWS, WORDS] and, for `int4`, its zero point.

    Neighbouring words ask for one scale; the loads meet in one line of the cache. Only the first
    word of a group and the first row of a block fill it.
    """
    half, unit = rows // M.half_rows, rows % M.half_rows
    first = words * M.per_word
    line = half * M.num_blocks + unit // M.block
    at = line[:, None] * M.num_groups + (first // M.group)[None, :]
    owned = (unit % M.block == 0)[:, None] & (first % M.group == 0)[None, :]
    source = field_pointer(record, M.scale, M.scale_type)
    target = field_pointer(fill, M.scale, M.scale_type)
    scale = _load_owned(source, target, at, exists, owned, fill, FILL)
    scale = decoded_scales(scale, M)
    if M.factor >= 0:
        source = field_pointer(record, M.factor, tl.float32)
        target = field_pointer(fill, M.factor, tl.float32)
        factor = _load_owned(source, target, half, inside, unit == 0, fill, FILL)
        scale = scale * factor[:, None]
    zero = tl.full((1, 1), 8.0, tl.float32)
    if M.zero >= 0:
        source = field_pointer(record, M.zero, tl.uint8)
        target = field_pointer(fill, M.zero, tl.uint8)
        zero = _load_owned(source, target, at, exists, owned, fill, FILL)
        zero = zero.to(tl.float32)
    return scale, zero


@triton.jit
def packed_tile(
    record,
    fill,
    rows,
    inside,
    first,
    M: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    FILL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Weights of `rows` and of the columns from `first` on: [ROWS, COLS], rounded to `DTYPE`.

    Columns beyond the matrix are 0 where they share a word with others, and finite otherwise, so
    they must meet zeros. Where `fill` is not 0, codes, scales and zero points go there too.
    """
    num_words: tl.constexpr = COLS // M.per_word
    words = first // M.per_word + tl.arange(0, num_words)
    exists = inside[:, None] & (words < M.row_words)[None, :]
    whole: tl.constexpr = WHOLE_ROWS and M.row_words % num_words == 0
    source = field_pointer(record, M.offset, tl.int32)
    target = field_pointer(fill, M.offset, tl.int32)
    offsets = rows[:, None] * M.row_words + words[None, :]
    word = load_weights(source, target, offsets, exists, fill, whole, FILL)
    scale, zero = _load_scales(record, fill, rows, words, inside, exists, M, FILL)
    exact: tl.constexpr = tl.bfloat16 == DTYPE and M.scale_is_bfloat16
    codes: tl.constexpr = M.codes  # Triton 3.6 takes text as an argument from a constexpr only
    scale, zero = pair_factors(scale, zero, exact, INTERPRET)

    # Codes J and J + half meet in the last dimension, then those of even and odd J, and so on:
    # the dimensions behind the words spell the code's number in binary.
    a, b = weights_of_pair(word, scale, zero, 0, codes, exact, DTYPE, INTERPRET)
    c, d = weights_of_pair(word, scale, zero, 1, codes, exact, DTYPE, INTERPRET)
    even, odd = tl.join(a, b), tl.join(c, d)
    if M.per_word == 8:
        a, b = weights_of_pair(word, scale, zero, 2, codes, exact, DTYPE, INTERPRET)
        c, d = weights_of_pair(word, scale, zero, 3, codes, exact, DTYPE, INTERPRET)
        even, odd = tl.join(even, tl.join(a, b)), tl.join(odd, tl.join(c, d))
    tile = tl.reshape(tl.join(even, odd), (ROWS, COLS))
    if M.columns % M.per_word != 0:
        cols = first + tl.arange(0, COLS)
        tile = tl.where((cols < M.columns)[None, :], tile, 0.0)
    return tile


@triton.jit
def input_columns(record, fill, rows, cols, M: tl.constexpr, FILL: tl.constexpr):
    """Which inputs the columns `cols` of a matrix multiply; beyond the matrix, column 0."""
    if M.order >= 0:
        source = field_pointer(record, M.order, tl.int32)
        target = field_pointer(fill, M.order, tl.int32)
        first_tile = tl.min(rows) == 0
        cols = _load_owned(source, target, cols, cols < M.columns, first_tile, fill, FILL)
    return cols
