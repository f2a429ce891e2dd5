"""Device functions that read a matrix of a record, plain or quantised, as a tile of weights.

The formulas are those of `dequantise`, bit for bit: FP32 arithmetic on codes in registers, each
weight rounded once to the compute dtype. Knows one matrix and one tile; nothing of experts,
tokens or grids. No FP8 or FP4 type of the hardware is used, so every card gives the same bits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from hotset.core.formats import CODES_PER_WORD
from hotset.core.geometry import ExpertSpec
from hotset.kernels.device import field_pointer, load_weights, round_to

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
class Matrix:
    """One matrix of a record as kernels know it when they are compiled.

    Attributes:
        codes: `plain`, `fp8`, `int4`, `fp4` or `lossless`.
        per_word: codes of a 32-bit word; 1 where plain, and where `lossless` makes it plain.
        columns: K.
        half_rows: N of a half.
        row_words: words from one row of codes to the next; of `lossless` groups of 8 columns.
        scale_codes: `float8_e4m3fn`, `float8_e8m0fnu`, or a number's dtype.
        scale_type: what a scale is loaded as.
        group, block: columns and rows of a half that share a scale.
        num_groups, num_blocks: how many of them.
        offset, scale, zero, factor, order: bytes into the record; `ABSENT` for none.
        exponent, row, rare: the same, of `lossless`.
        row_rare, rare_places: places of its table for a row, and the power of two above.
    """

    codes: str
    per_word: int
    columns: int
    half_rows: int
    row_words: int
    scale_codes: str
    scale_type: tl.dtype
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
            scale_type=_SCALE_TYPES[form.scale_dtype],
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
def decode_e4m3(code):
    """E4M3FN bits (uint8) to FP32, exact for every code."""
    bits = code.to(tl.int32)
    magnitude = bits & 0x7F
    value = (((bits & 0x80) << 24) | (magnitude << 20)).to(tl.float32, bitcast=True)
    return tl.where(magnitude == 0x7F, float("nan"), value * 1.329227995784916e36)  # 2^120


@triton.jit
def decode_e8m0(code):
    """E8M0 bits (uint8) to FP32, exact for every code; 2^-127 is subnormal."""
    bits = code.to(tl.int32)
    value = tl.where(bits == 0, 0x00400000, bits << 23)
    return tl.where(bits == 255, 0x7FC00000, value).to(tl.float32, bitcast=True)


@triton.jit
def _split_halves(pair):
    """Two numbers, in the upper 16 bits of FP32 each, that share a word: (low half, high half)."""
    low = (pair << 16).to(tl.float32, bitcast=True)
    return low, (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def code_values(word, zero, J: tl.constexpr, CODES: tl.constexpr):
    """FP32 values of two codes of each word, J and J + half as many as a word has.

    The two are 16 bits apart, so that one shift and one mask bring both to the place of sign,
    exponent and mantissa in BF16; a product with a power of two then sets the exponent right,
    which is exact, subnormal codes included. `zero` is the zero point of `int4`.
    """
    if CODES == "fp8":
        at_top = word << (8 - 8 * J)
        low, high = _split_halves((at_top & -2147450880) | ((at_top >> 4) & 0x07F007F0))
        low, high = low * 1.329227995784916e36, high * 1.329227995784916e36  # 2^120
        # 480 is what the bits of NaN would be.
        low = tl.where(tl.abs(low) == 480.0, float("nan"), low)
        high = tl.where(tl.abs(high) == 480.0, float("nan"), high)
    elif CODES == "fp4":
        at_top = word << (12 - 4 * J)
        low, high = _split_halves((at_top & -2147450880) | ((at_top >> 6) & 0x01C001C0))
        low, high = low * 8.507059173023462e37, high * 8.507059173023462e37  # 2^126
    else:
        # As mantissa of 2^23 a code needs no conversion, which would run at a quarter of the rate,
        # and no shift. All of this is exact.
        low = ((word & (0xF << 4 * J)) | 0x4B000000).to(tl.float32, bitcast=True)
        high = (((word >> 16) & (0xF << 4 * J)) | 0x4B000000).to(tl.float32, bitcast=True)
        unit: tl.constexpr = 1.0 / (1 << 4 * J)
        base = 8388608.0 * unit + zero
        low, high = low * unit - base, high * unit - base
    return low, high


@triton.jit
def _load_owned(source, target, offsets, inside, owned, fill, FILL: tl.constexpr):
    """Values that several tiles read; the tile that owns one also fills it."""
    values = tl.load(source + offsets, mask=inside, other=0)
    if FILL:  # noqa: SIM102 (known when compiled; the inner one is not)
        if fill != 0:
            tl.store(target + offsets, values, mask=inside & owned)
    return values


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
    if M.scale_codes == "float8_e4m3fn":
        scale = decode_e4m3(scale)
    elif M.scale_codes == "float8_e8m0fnu":
        scale = decode_e8m0(scale)
    else:
        scale = scale.to(tl.float32)
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
def _halves_as(both, OUT: tl.constexpr):
    """Two BF16 numbers that share a word, as BF16 or FP32."""
    if OUT == tl.float32:  # noqa: SIM300
        low, high = _split_halves(both)
    else:
        low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def _twice(x):
    """FP32 numbers that BF16 holds, as two equal BF16 in a word."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits & -65536) | ((bits >> 16) & 0xFFFF)


@triton.jit
def _int4_in_bfloat16(word, scale, zero, J: tl.constexpr, OUT: tl.constexpr):
    """`_weights_of_pair` of `int4` with BF16 scales: two weights an instruction.

    As mantissa of 2^7 a code is BF16; without 128 + zero it is still exact, and the product with
    a BF16 scale is rounded once, as one of FP32 that is exact would be. A product is a sum with
    -0, which older cards have and which keeps the sign of zero.
    """
    both = tl.inline_asm_elementwise(
        """{
        .reg .b32 code, one, none;
        mov.b32 one, 0x3F803F80;
        mov.b32 none, 0x80008000;
        lop3.b32 code, $1, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 code, code, one, $3;
        fma.rn.bf16x2 $0, code, $2, none;
        }""",
        "=r,r,r,r",
        [word >> 4 * J, _twice(scale), _twice(-128.0 - zero)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    return _halves_as(both, OUT)


@triton.jit
def _round_pair(
    low,
    high,
    M: tl.constexpr,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Two FP32 weights rounded to `DTYPE`, as `OUT`: `DTYPE` or FP32."""
    is_bfloat16: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
    if is_bfloat16 and M.codes == "fp4" and M.scale_codes == "float8_e8m0fnu":
        # Two bits times a power of two: BF16 holds every one of them, subnormal ones included.
        low, high = round_to(low, OUT, INTERPRET), round_to(high, OUT, INTERPRET)
    elif is_bfloat16 and not INTERPRET:
        # Two in one instruction; the compiler would take one each, of a lower rate.
        both = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,r,r",
            [low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        low, high = _halves_as(both, OUT)
    else:
        low = round_to(low, DTYPE, INTERPRET).to(OUT)
        high = round_to(high, DTYPE, INTERPRET).to(OUT)
    return low, high


@triton.jit
def _weights_of_pair(
    word,
    scale,
    zero,
    J: tl.constexpr,
    M: tl.constexpr,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Weights of two codes of each word (see `code_values`), rounded to `DTYPE`, as `OUT`."""
    codes: tl.constexpr = M.codes  # Triton 3.6 takes text as an argument from a constexpr only
    is_bfloat16: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
    if is_bfloat16 and codes == "int4" and M.scale_codes == "bfloat16" and not INTERPRET:
        low, high = _int4_in_bfloat16(word, scale, zero, J, OUT)
    else:
        low, high = code_values(word, zero, J, codes)
        low, high = _round_pair(low * scale, high * scale, M, DTYPE, OUT, INTERPRET)
    return low, high


@triton.jit
def packed_tile(
    record,
    fill,
    rows,
    inside,
    first,
    M: tl.constexpr,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    FILL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Weights of `rows` and of the columns from `first` on: [ROWS, COLS], rounded to `DTYPE`.

    They come as `OUT`: `DTYPE`, or FP32 where they are multiplied as that.

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

    # Codes J and J + half meet in the last dimension, then those of even and odd J, and so on:
    # the dimensions behind the words spell the code's number in binary.
    a, b = _weights_of_pair(word, scale, zero, 0, M, DTYPE, OUT, INTERPRET)
    c, d = _weights_of_pair(word, scale, zero, 1, M, DTYPE, OUT, INTERPRET)
    even, odd = tl.join(a, b), tl.join(c, d)
    if M.per_word == 8:
        a, b = _weights_of_pair(word, scale, zero, 2, M, DTYPE, OUT, INTERPRET)
        c, d = _weights_of_pair(word, scale, zero, 3, M, DTYPE, OUT, INTERPRET)
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
        first_tile = tl.min(rows, 0) == 0
        cols = _load_owned(source, target, cols, cols < M.columns, first_tile, fill, FILL)
    return cols
