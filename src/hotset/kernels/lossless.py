"""Device functions that read a matrix of a record in the lossless format: BF16 in 12 bits a weight.

    bits(w) = sign << 15 | (base + code) << 7 | mantissa      code 1 to 15
    bits(w) = rare[first + byte]                              code 0

See `core.formats.lossless_fields`. Every weight comes out with the bits that it had, and a tile
lies in threads as a plain one does, 8 neighbouring columns in each: so whatever multiplies it has
the bits, and the order of sums, of plain weights. Knows one matrix; nothing of experts or tokens.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from hotset.kernels.device import field_pointer, load_tile

# A base of 255 is no row's but poison, of a slot that nobody owns. As 240 it makes NaN of poison.
_HIGHEST_BASE = tl.constexpr(240)

# Eight weights of a group, two to a word: $0 to $3 of bytes $4, codes $5, the row's base as two
# exponents $6, and its part of the table $7. `prmt` with the 8 set spreads a byte's sign over the
# byte above it. The last lines are for a group with a rare weight (a code of 0), one in 800; they
# read the table, which lies beside the record: behind the link that is a second trip, but rarely.
_EIGHT_WEIGHTS = tl.constexpr(
    """{
    .reg .b32 bytes0, bytes1, later, m, e, code, number, zero;
    .reg .b64 at;
    .reg .pred common, is_rare;
    .reg .b16 low, high;
    mov.b64 {bytes0, bytes1}, $4;
    shr.u32 later, $5, 8;
    prmt.b32 m, bytes0, 0, 0x9180;
    and.b32 e, $5, 0x000F000F;
    mad.lo.s32 e, e, 128, $6;
    lop3.b32 $0, m, 0x807F807F, e, 0xEA;
    prmt.b32 m, bytes0, 0, 0xB3A2;
    and.b32 e, $5, 0x00F000F0;
    mad.lo.s32 e, e, 8, $6;
    lop3.b32 $1, m, 0x807F807F, e, 0xEA;
    prmt.b32 m, bytes1, 0, 0x9180;
    and.b32 e, later, 0x000F000F;
    mad.lo.s32 e, e, 128, $6;
    lop3.b32 $2, m, 0x807F807F, e, 0xEA;
    prmt.b32 m, bytes1, 0, 0xB3A2;
    and.b32 e, later, 0x00F000F0;
    mad.lo.s32 e, e, 8, $6;
    lop3.b32 $3, m, 0x807F807F, e, 0xEA;
    sub.s32 zero, $5, 0x11111111;
    not.b32 code, $5;
    and.b32 zero, zero, code;
    and.b32 zero, zero, 0x88888888;
    setp.eq.s32 common, zero, 0;
    @common bra DONE;
"""
    + "".join(
        f"""
    and.b32 code, $5, {0xF << (4 * (column // 2) + 16 * (column % 2)):#x};
    setp.eq.s32 is_rare, code, 0;
    bfe.u32 number, bytes{column // 4}, {8 * (column % 4)}, 8;
    mad.wide.u32 at, number, 2, $7;
    mov.b32 {{low, high}}, ${column // 2};
    @is_rare ld.global.b16 {"high" if column % 2 else "low"}, [at];
    mov.b32 ${column // 2}, {{low, high}};
"""
        for column in range(8)
    )
    + """
    DONE:
    }"""
)


@triton.jit
def _weight_bits(byte, code, base, table):
    """The specification, for the interpreter: bits of one weight of each group, int32."""
    rare = code == 0
    bits = ((byte & 0x80) << 8) | (byte & 0x7F) | ((base + code) << 7)
    patterns = tl.load(table + byte, mask=rare, other=0).to(tl.int32) & 0xFFFF
    return tl.where(rare, patterns, bits)


@triton.jit
def _pair(group, codes, base, table, J: tl.constexpr):
    """Weights 2J and 2J + 1 of each group, as two BF16 in a word."""
    low = (group >> (16 * J)).to(tl.int32) & 0xFF
    high = (group >> (16 * J + 8)).to(tl.int32) & 0xFF
    low = _weight_bits(low, (codes >> (4 * J)) & 0xF, base, table)
    high = _weight_bits(high, (codes >> (4 * J + 16)) & 0xF, base, table)
    return low | (high << 16)


@triton.jit
def _four_words(group, codes, base, table, INTERPRET: tl.constexpr):
    """Eight weights of each group as BF16, two to a word.

    Args:
        group: int64 [ROWS, GROUPS], eight bytes.
        codes: int32 [ROWS, GROUPS].
        base: int32 [ROWS, 1].
        table: pointers to int16 [ROWS, 1].
    """
    if INTERPRET:
        a = _pair(group, codes, base, table, 0)
        b = _pair(group, codes, base, table, 1)
        c = _pair(group, codes, base, table, 2)
        d = _pair(group, codes, base, table, 3)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _EIGHT_WEIGHTS,
            "=&r,=&r,=&r,=&r,l,r,r,l",
            [group, codes, base * 0x00800080, table.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return a, b, c, d


@triton.jit
def load_rows(record, rows, inside, M: tl.constexpr):
    """What the record says of each row, int32 [ROWS]: see `base_and_table`."""
    return tl.load(field_pointer(record, M.row, tl.int32) + rows, mask=inside, other=0)


@triton.jit
def base_and_table(record, header, M: tl.constexpr):
    """(base, pointer to its part of the table) of each row: [ROWS]."""
    base = tl.minimum(header & 0xFF, _HIGHEST_BASE)
    return base, field_pointer(record, M.rare, tl.int16) + ((header >> 8) & 0xFFFFFF)


@triton.jit
def fill_rows(record, fill, header, rows, inside, M: tl.constexpr, FILL: tl.constexpr):
    """Stores what `load_rows` has read, and as many places of the table, to the slot at `fill`,
    where that is not 0."""
    if FILL:  # noqa: SIM102 (known when compiled; the inner one is not)
        if fill != 0:
            tl.store(field_pointer(fill, M.row, tl.int32) + rows, header, mask=inside)
            place = tl.arange(0, M.rare_places)
            at = rows[:, None] * M.row_rare + place[None, :]
            exists = inside[:, None] & (place < M.row_rare)[None, :]
            patterns = tl.load(field_pointer(record, M.rare, tl.int16) + at, mask=exists, other=0)
            tl.store(field_pointer(fill, M.rare, tl.int16) + at, patterns, mask=exists)


@triton.jit
def _group_pointer(record, OFFSET: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """Pointer to groups of a record, with `WIDE` several in one access. Else a thread has one at a
    time: 8 columns, as it has of plain weights. Nothing is said of alignment then, which decides
    how values lie in threads, and so the order of sums."""
    if WIDE:
        return field_pointer(record, OFFSET, DTYPE)
    return (record + OFFSET).to(tl.pointer_type(DTYPE))


@triton.jit
def load_groups(
    record,
    rows,
    inside,
    first,
    M: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """(bytes, codes) of `rows` and columns from `first` on: int64 and int32 [ROWS, COLS / 8]."""
    num_groups: tl.constexpr = COLS // 8
    groups = first // 8 + tl.arange(0, num_groups)
    at = rows[:, None] * M.row_words + groups[None, :]
    data = _group_pointer(record, M.offset, tl.int64, WIDE) + at
    exponents = _group_pointer(record, M.exponent, tl.int32, WIDE) + at
    if WHOLE_ROWS and M.row_words % num_groups == 0:
        group, codes = tl.load(data), tl.load(exponents)
    else:
        exists = inside[:, None] & (groups < M.row_words)[None, :]
        group = tl.load(data, mask=exists, other=0)
        # Of codes 15, since 0 would be rare.
        codes = tl.load(exponents, mask=exists, other=-1)
    return group, codes


@triton.jit
def fill_groups(
    fill,
    group,
    codes,
    rows,
    inside,
    first,
    M: tl.constexpr,
    COLS: tl.constexpr,
    FILL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Stores what `load_groups` has read to the slot at `fill`, where that is not 0."""
    if FILL:  # noqa: SIM102 (known when compiled; the inner one is not)
        if fill != 0:
            groups = first // 8 + tl.arange(0, COLS // 8)
            exists = inside[:, None] & (groups < M.row_words)[None, :]
            at = rows[:, None] * M.row_words + groups[None, :]
            tl.store(_group_pointer(fill, M.offset, tl.int64, WIDE) + at, group, mask=exists)
            tl.store(_group_pointer(fill, M.exponent, tl.int32, WIDE) + at, codes, mask=exists)


@triton.jit
def weights_of_groups(
    group,
    codes,
    base,
    table,
    first,
    M: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """The weights of groups as `OUT`, BF16 or FP32: [ROWS, COLS], 0 beyond the matrix."""
    a, b, c, d = _four_words(group, codes, base[:, None], table[:, None], INTERPRET)
    # The dimensions behind the groups spell the column in binary: which half of the group, which
    # word of the half, which half of the word.
    words = tl.join(tl.join(a, c), tl.join(b, d))
    if OUT == tl.float32:  # noqa: SIM300
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(OUT, bitcast=True)
        high = (words >> 16).to(tl.int16).to(OUT, bitcast=True)
    tile = tl.reshape(tl.join(low, high), (ROWS, COLS))
    if M.columns % COLS != 0:
        cols = first + tl.arange(0, COLS)
        tile = tl.where((cols < M.columns)[None, :], tile, 0.0)
    return tile


@triton.jit
def first_groups(
    record, rows, inside, M: tl.constexpr, COLS: tl.constexpr, WHOLE_ROWS: tl.constexpr
):
    """What `lossless_row_sums` begins with: headers of rows, and the bytes and codes of their first
    columns."""
    group, codes = load_groups(record, rows, inside, 0, M, COLS, WHOLE_ROWS, False)
    return load_rows(record, rows, inside, M), group, codes


@triton.jit
def lossless_row_sums(
    vector,
    record,
    fill,
    rows,
    inside,
    header,
    group,
    codes,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    FILL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Dot products of `vector` with `rows`: [ROWS] FP32, in the order of `plain.plain_row_sums`.

    Args:
        header, group, codes: see `first_groups`.
    """
    whole_cols: tl.constexpr = M.columns % COLS == 0
    base, table = base_and_table(record, header, M)
    fill_rows(record, fill, header, rows, inside, M, FILL)
    # The first product is added to -0, which changes no bit of it.
    acc = tl.full((ROWS, COLS), -0.0, tl.float32)
    for first in range(0, M.columns, COLS):
        # On their way while these are unpacked: behind a branch no load would be moved ahead.
        more = inside & (first + COLS < M.columns)
        later = first + COLS
        later_group, later_codes = load_groups(record, rows, more, later, M, COLS, False, False)
        fill_groups(fill, group, codes, rows, inside, first, M, COLS, FILL, False)
        cols = first + tl.arange(0, COLS)
        v = load_tile(vector + cols, cols < M.columns, whole_cols)
        w = weights_of_groups(
            group, codes, base, table, first, M, tl.float32, ROWS, COLS, INTERPRET
        )
        acc += w * v.to(tl.float32)[None, :]
        group, codes = later_group, later_codes
    return tl.sum(acc, 1)


@triton.jit
def lossless_tile(
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
    """Weights of `rows` and of the columns from `first` on: [ROWS, COLS] BF16; also filled."""
    header = load_rows(record, rows, inside, M)
    base, table = base_and_table(record, header, M)
    if first == 0:
        fill_rows(record, fill, header, rows, inside, M, FILL)
    group, codes = load_groups(record, rows, inside, first, M, COLS, WHOLE_ROWS, True)
    fill_groups(fill, group, codes, rows, inside, first, M, COLS, FILL, True)
    return weights_of_groups(group, codes, base, table, first, M, DTYPE, ROWS, COLS, INTERPRET)
