"""How a weight matrix lies in a record: its codes, and what turns them into weights.

Knows sizes and meanings, not values, and nothing of how checkpoints name or pack them. The
formula in plain torch is in `kernels/dequantise`.

Letters: N rows (out) and K columns (in) of a matrix. A *half* is the gate or the up rows of the
first projection, or all rows of a matrix that has no such halves.
"""

from __future__ import annotations

from dataclasses import dataclass

# (field name, shape, dtype) as `core.record.RecordLayout.build` takes them
FieldSpec = tuple[str, tuple[int, ...], str]

# Codes of one 32-bit word, by format. Kernels read codes as words, so a row is padded to whole
# ones; published rows are whole words, so a file's row is the record's row byte for byte.
CODES_PER_WORD = {"fp8": 4, "int4": 8, "nvfp4": 8, "mxfp4": 8, "lossless": 8}
WORD_BYTES = 4

# Scales are numbers, or codes of one byte: E4M3 (`float8_e4m3fn`) or E8M0 (`float8_e8m0fnu`).
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu")


@dataclass(frozen=True)
class WeightFormat:
    """How the numbers of one matrix are stored.

    A weight is `value(code) * scale`, with codes of `fp8` in E4M3 (it has no infinities), of
    `nvfp4` and `mxfp4` in E2M1, and of `int4` from 0 to 15, where `value = code - zero`. Codes of
    4 bits lie two to a byte along K, the even column in the low half. `lossless` has no scales: it
    is BF16 itself in about 12 bits (`lossless_fields`).

    Attributes:
        name: `plain` (numbers of the compute dtype, no codes), `fp8`, `int4`, `nvfp4`, `mxfp4`,
            `lossless`.
        scale_dtype: one of `SCALE_DTYPES`; empty in `plain`.
        scale_columns: values along K that share a scale, a multiple of 8, so that a word has one
            scale; `None` for a whole row. The last group of a row may be partial.
        scale_rows: rows of a half that share a scale; `None` for all of them. The last block may
            be partial; rows of two halves never share a scale.
        has_zeros: a zero point for each scale, from 0 to 16 (GPTQ stores one less than it means);
            otherwise it is 8.
        has_global: a second scale in FP32 for each half: gate and up keep their own. It
            multiplies; a published divisor is stored as its reciprocal.
        has_order: columns lie in another order than the input's, those of one group side by side
            (GPTQ's activation order, `g_idx`). Only the first projection may have it: the columns
            of the second are put in order by permuting the rows of the first, which is exact.
    """

    name: str
    scale_dtype: str = ""
    scale_columns: int | None = None
    scale_rows: int | None = 1
    has_zeros: bool = False
    has_global: bool = False
    has_order: bool = False

    def __post_init__(self) -> None:
        if self.is_plain or self.is_lossless:
            assert self.scale_dtype == "" and self.scale_columns is None and self.scale_rows == 1
            assert not (self.has_zeros or self.has_global or self.has_order)
            return
        assert self.name in CODES_PER_WORD, self.name
        assert self.scale_dtype in SCALE_DTYPES, self.scale_dtype
        assert self.scale_columns is None or self.scale_columns % 8 == 0, self.scale_columns
        assert not self.has_zeros or self.name == "int4", self.name

    @property
    def is_plain(self) -> bool:
        return self.name == "plain"

    @property
    def is_lossless(self) -> bool:
        return self.name == "lossless"

    def row_words(self, columns: int) -> int:
        """32-bit words of one row of codes."""
        return -(-columns // CODES_PER_WORD[self.name])

    def num_groups(self, columns: int) -> int:
        """Scales along K."""
        return 1 if self.scale_columns is None else -(-columns // self.scale_columns)

    def num_blocks(self, rows: int) -> int:
        """Scales along the rows of a half."""
        return 1 if self.scale_rows is None else -(-rows // self.scale_rows)

    def fields(
        self, name: str, *, halves: int, rows: int, columns: int, dtype: str
    ) -> list[FieldSpec]:
        """The record fields of a matrix, in record order.

        All are row-major, as published: kernels take 2048 codes of a row in one step, which is a
        whole 128-byte line of NVFP4's or of INT4's (groups of 32) scales and half of one of
        MXFP4's, so an order by tiles would save little and cost the loader its plain reads. Codes
        and scales of one byte are `uint8`: bits that no copy may convert.

        Args:
            name: `up` or `down`.
            halves: 2 where gate rows come before up rows, otherwise 1.
            rows: N of one half.
            columns: K.
            dtype: compute dtype, that of plain numbers.

        Returns:
            `name` [halves * N, K], of codes the bytes of a row; and where the format has them
            `name_scale` [halves * blocks, groups], `name_zero` uint8 of the same shape,
            `name_global` float32 [halves], `name_order` int32 [K]: column c of the codes
            multiplies input `order[c]`.
        """
        if self.is_plain:
            return [(name, (halves * rows, columns), dtype)]
        if self.is_lossless:
            assert dtype == "bfloat16", dtype
            return lossless_fields(name, rows=halves * rows, columns=columns)
        grid = (halves * self.num_blocks(rows), self.num_groups(columns))
        one_byte = self.scale_dtype.startswith("float8")
        specs: list[FieldSpec] = [
            (name, (halves * rows, self.row_words(columns) * WORD_BYTES), "uint8"),
            (f"{name}_scale", grid, "uint8" if one_byte else self.scale_dtype),
        ]
        if self.has_zeros:
            specs.append((f"{name}_zero", grid, "uint8"))
        if self.has_global:
            specs.append((f"{name}_global", (halves,), "float32"))
        if self.has_order:
            specs.append((f"{name}_order", (columns,), "int32"))
        return specs


# Weights of a group of `lossless`: a 32-bit word of exponents.
LOSSLESS_GROUP = 8
# Exponents that a row can name, side by side: codes 1 to 15; code 0 is a rare weight.
LOSSLESS_WINDOW = 15
# Rare weights that a row may name: by one byte.
LOSSLESS_MOST_RARE = 256


def lossless_fields(name: str, *, rows: int, columns: int) -> list[FieldSpec]:
    """The record fields of a matrix of BF16 weights in about 12 bits each.

    The exponents of a row's weights lie close together: nearly all are one of 15 values. So a
    weight is a byte, its sign and mantissa, and a code of 4 bits, exponent = base of the row +
    code. A weight that is too small (or, beside outliers, too large) for that has code 0, and its
    byte is the number of its 16 bits in the row's part of a table, where equal ones share a place.

    Returns:
        G groups of 8 columns, the last one padded:
        `name` uint8 [rows, 8 G]: sign << 7 | mantissa, or a number into the table.
        `name_exponent` uint8 [rows, 4 G]: for each group a 32-bit word; the code of column c is at
        bit 4 (c // 2) + 16 (c % 2), so that one shift brings those of a pair of columns to the
        exponents of two BF16 in a word.
        `name_row` int32 [rows]: base | first << 8, its part of the table begins at entry `first`.
        `name_rare` int16 [rows, 2 + columns // 512]: the table, of all rows together. Of normally
        distributed weights one in 6,000 is rare; there is room for one in 512, and two a row.
    """
    groups = -(-columns // LOSSLESS_GROUP)
    return [
        (name, (rows, groups * LOSSLESS_GROUP), "uint8"),
        (f"{name}_exponent", (rows, groups * WORD_BYTES), "uint8"),
        (f"{name}_row", (rows,), "int32"),
        (f"{name}_rare", (rows, 2 + columns // 512), "int16"),
    ]


PLAIN = WeightFormat("plain")
LOSSLESS = WeightFormat("lossless")
NVFP4 = WeightFormat("nvfp4", "float8_e4m3fn", scale_columns=16, has_global=True)
MXFP4 = WeightFormat("mxfp4", "float8_e8m0fnu", scale_columns=32)


def fp8(scale_dtype: str, *, block: tuple[int | None, int | None] = (128, 128)) -> WeightFormat:
    """E4M3 codes with one scale for each block.

    Args:
        scale_dtype: one of `SCALE_DTYPES`.
        block: (rows, columns) of a block: (1, None) is a scale for each row ("channel"),
            (None, None) one for each half ("tensor"), (1, 32) with E8M0 scales is MXFP8.
    """
    rows, columns = block
    return WeightFormat("fp8", scale_dtype, scale_columns=columns, scale_rows=rows)


def int4(
    scale_dtype: str, *, group: int | None, has_zeros: bool = False, has_order: bool = False
) -> WeightFormat:
    """Unsigned 4-bit codes with one scale for each `group` values of a row (`None`: a row)."""
    return WeightFormat(
        "int4",
        scale_dtype,
        scale_columns=group,
        has_zeros=has_zeros,
        has_order=has_order,
    )


# As most published checkpoints have them: what a benchmark means by a name.
USUAL = {
    "plain": PLAIN,
    "fp8": fp8("bfloat16"),
    "int4": int4("bfloat16", group=128),
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
    "lossless": LOSSLESS,
}
