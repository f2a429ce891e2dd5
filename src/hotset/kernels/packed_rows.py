"""Device functions for one token: sums over rows of a quantised matrix, on tensor cores.

With one token seven of the eight columns of a tensor core's product would be idle. So they take
parts of the sum: a row of the record becomes `PARTS` rows of the operand, 16 words of codes each,
and column p of the other operand has the inputs of part p. What is wanted lies on a diagonal. A
warp thus reads whole lines of a row, and every thread decodes the 16 bytes that it has read.
Knows one matrix and one tile; nothing of experts or grids.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from hotset.core.formats import WORD_BYTES
from hotset.core.record import ALIGN_BYTES
from hotset.kernels.codes import pair_factors, weights_of_pair
from hotset.kernels.device import dot, field_pointer, load_tile
from hotset.kernels.packed import decoded_scales, input_columns

# Words of a part: 4 neighbouring threads share a row of the operand, and read 16 bytes each.
PART_WORDS = tl.constexpr(16)
LINE_WORDS = tl.constexpr(ALIGN_BYTES // WORD_BYTES)


@triton.jit
def tile_units(tile, place, UNITS: tl.constexpr, STRIDE: tl.constexpr):
    """Rows of a half at places of a tile, which holds `UNITS` of them, each `STRIDE`-th."""
    return tile // STRIDE * (UNITS * STRIDE) + tile % STRIDE + place * STRIDE


@triton.jit
def tile_rows(tile, M: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Rows of a tile [ROWS], whether each exists, and the tile's first word.

    With a gate the first half are gate rows, and the second half the up rows of the same units.
    That is also how a block lies, which is what one product of a tensor core computes: 8 rows of
    the operand from the first half above 8 from the second.

    The first word of a row that is read is not after its first one, and begins a line: a warp that
    read across the ends of lines would ask the link for more pieces than there are lines.

    Args:
        tile: its number.
    """
    row = tl.arange(0, ROWS)
    units: tl.constexpr = ROWS // 2 if GATED else ROWS
    unit = tile_units(tile, row % units, units, M.stride)
    inside = unit < M.half_rows
    begin = 0
    if M.stride > 1:
        # As a product with 4, which tells the compiler that 16 bytes may be read at a time.
        before = tile % M.stride * (M.row_words // 4) % (LINE_WORDS // 4)
        begin = before * -4
    return unit + row // units * M.half_rows, inside, begin


@triton.jit
def _grid_places(rows, inside, word, M: tl.constexpr, COLS: tl.constexpr):
    """Where the scales of a step from `word` on are [G, ROWS, S], which exist, which it owns.

    Each thread reads those of the 4 words that it has of a row: S for each of G such threads, one
    for each word where groups and steps do not divide each other. G is 1 where a step has one.
    The first row of a block and the first group that begins in a step own.
    """
    alone: tl.constexpr = M.group >= M.columns
    one: tl.constexpr = alone or (M.group % COLS == 0 and M.stride == 1)
    num: tl.constexpr = 1 if one else COLS // (4 * M.per_word)
    whole: tl.constexpr = COLS % M.group == 0
    each: tl.constexpr = 1 if one else max(1, 4 * M.per_word // (M.group if whole else M.per_word))
    place = tl.arange(0, num)[:, None, None] * each + tl.arange(0, each)[None, None, :]
    first = word * M.per_word + place * (COLS // (num * each))
    if alone:
        first = tl.maximum(first, 0)
    rows, inside = rows[None, :, None], inside[None, :, None]
    half, unit = rows // M.half_rows, rows % M.half_rows
    line = half * M.num_blocks + unit // M.block
    exists = inside & (first >= 0) & (first < M.columns)
    owned = (unit % M.block == 0) & (first % M.group == 0)
    group = first // M.group
    if COLS // (num * each) == M.group:
        # The same number, in a form from which the compiler sees that neighbours lie side by side.
        group = word * M.per_word // M.group + place
    return line * M.num_groups + group, exists, exists & owned


@triton.jit
def _word_places(rows, inside, word, M: tl.constexpr, COLS: tl.constexpr):
    """Where the words of a step from `word` on are [ROWS, WORDS], and which exist."""
    word += tl.arange(0, COLS // M.per_word)[None, :]
    exists = inside[:, None] & (word >= 0) & (word < M.row_words)
    return rows[:, None] * M.row_words + word, exists


@triton.jit
def _read_step(
    record, rows, inside, first, M: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr
):
    """Words from `first` on, scales and zero points of one step as they lie in the record."""
    at, exists = _word_places(rows, inside, first, M, COLS)
    word = load_tile(field_pointer(record, M.offset, tl.int32) + at, exists, WHOLE)
    at, exists, _ = _grid_places(rows, inside, first, M, COLS)
    scale = tl.load(field_pointer(record, M.scale, M.scale_type) + at, mask=exists, other=0)
    zero = tl.full((1, 1, 1), 8, tl.uint8)
    if M.zero >= 0:
        zero = tl.load(field_pointer(record, M.zero, tl.uint8) + at, mask=exists, other=0)
    return word, scale, zero


@triton.jit
def _fill_step(fill, rows, inside, first, word, scale, zero, M: tl.constexpr, COLS: tl.constexpr):
    """Writes what `_read_step` has read to the slot at `fill`, where that is not 0.

    By a mask, since a branch would keep the compiler from reading ahead.
    """
    filled = fill != 0
    at, exists = _word_places(rows, inside, first, M, COLS)
    tl.store(field_pointer(fill, M.offset, tl.int32) + at, word, mask=exists & filled)
    at, _, owned = _grid_places(rows, inside, first, M, COLS)
    target = field_pointer(fill, M.scale, M.scale_type) + at
    tl.store(target, scale, mask=owned & filled)
    if M.zero >= 0:
        tl.store(field_pointer(fill, M.zero, tl.uint8) + at, zero, mask=owned & filled)


@triton.jit
def read_ahead(
    record,
    rows,
    inside,
    begin,
    M: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
):
    """The first `STEPS` steps of a matrix, for `packed_row_sums`: three tensors each."""
    words: tl.constexpr = COLS // M.per_word
    whole: tl.constexpr = WHOLE_ROWS and M.row_words % words == 0 and M.stride == 1
    steps = _read_step(record, rows, inside, begin, M, COLS, whole)
    for step in tl.static_range(1, STEPS):
        steps += _read_step(record, rows, inside, begin + step * words, M, COLS, whole)
    return steps


@triton.jit
def _load_factor(record, fill, rows, inside, M: tl.constexpr, FILL: tl.constexpr):
    """The second scale of each row, of its half: 1 where the format has none."""
    factor = tl.full((1, 1, 1), 1.0, tl.float32)
    if M.factor >= 0:
        rows, inside = rows[None, :, None], inside[None, :, None]
        half, unit = rows // M.half_rows, rows % M.half_rows
        factor = tl.load(field_pointer(record, M.factor, tl.float32) + half, mask=inside, other=0.0)
        if FILL:
            target = field_pointer(fill, M.factor, tl.float32) + half
            tl.store(target, factor, mask=inside & (unit == 0) & (fill != 0))
    return factor


@triton.jit
def _existing_codes(word, first, M: tl.constexpr, WORDS: tl.constexpr):
    """Words without what pads a row's last one: any bits, which may mean NaN."""
    rest: tl.constexpr = M.columns % M.per_word
    if rest != 0:
        last = first + tl.arange(0, WORDS) == M.row_words - 1
        kept = tl.where(last, (1 << (32 // M.per_word * rest)) - 1, -1)
        word = word & kept[None, :]
    return word


@triton.jit
def _factors(
    scale,
    zero,
    factor,
    M: tl.constexpr,
    WORDS: tl.constexpr,
    EXACT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Scale and zero point of each word [ROWS, WORDS], as pairs of codes take them."""
    scale = decoded_scales(scale, M)
    if M.factor >= 0:
        scale = scale * factor
    scale, zero = pair_factors(scale, zero.to(tl.float32), EXACT, INTERPRET)
    return _of_words(scale, WORDS), tl.reshape(zero, (1, 1)) if M.zero < 0 else _of_words(
        zero, WORDS
    )


@triton.jit
def _of_words(x, WORDS: tl.constexpr):
    """[G, ROWS, S] of `_grid_places` to a value for each word: [ROWS, WORDS]."""
    num: tl.constexpr = x.shape[0] * x.shape[2]
    rows: tl.constexpr = x.shape[1]
    x = tl.reshape(tl.permute(x, (1, 0, 2)), (rows, num))
    wide = tl.broadcast_to(x[:, :, None], (rows, num, WORDS // num))
    return tl.reshape(wide, (rows, WORDS))


@triton.jit
def _operand(x, HEAD: tl.constexpr, M: tl.constexpr):
    """[HEAD, 16 words, 2] to [HEAD, 32]: neighbours within a thread as the compiler wants them.

    It gives a thread of an operand 4 words side by side where it has seen a load of single bytes,
    and 2 otherwise. With words that one thread has read in those places nothing crosses between
    threads. Both operands have the same order, so that the sums mean the same.
    """
    if not M.reads_bytes:
        x = tl.permute(tl.reshape(x, (HEAD, 4, 2, 4)), (0, 2, 1, 3))
    return tl.reshape(x, (HEAD, 32))


@triton.jit
def _load_eight(
    vector,
    record,
    fill,
    rows,
    first,
    PART: tl.constexpr,
    COPIES: tl.constexpr,
    COLS: tl.constexpr,
    M: tl.constexpr,
    FILL: tl.constexpr,
):
    """Eight of the inputs that each lane multiplies in a step, the `PART`-th: [COPIES, 256].

    Each warp reads all of them, and each lane those of its 4 words in whole accesses: so nothing
    passes through shared memory, where every step would wait for all warps.
    """
    lane_columns: tl.constexpr = 4 * M.per_word
    place = tl.zeros((COPIES, 1), tl.int32) + tl.arange(0, 256)[None, :]
    col = place // 8 * lane_columns % COLS + 8 * PART + place % 8
    cols = first * M.per_word + col
    inputs = input_columns(record, fill, rows, cols, M, FILL)
    exists = (cols >= 0) & (cols < M.columns)
    return load_tile(vector + inputs, exists, M.columns % COLS == 0 and M.stride == 1)


@triton.jit
def _input_pairs(
    vector,
    record,
    fill,
    rows,
    first,
    COPIES: tl.constexpr,
    COLS: tl.constexpr,
    M: tl.constexpr,
    FILL: tl.constexpr,
):
    """Inputs of a step by the pair of codes of a word: tensors [COPIES * 8, 16 words, 2]."""
    a = _load_eight(vector, record, fill, rows, first, 0, COPIES, COLS, M, FILL)
    b = _load_eight(vector, record, fill, rows, first, 1, COPIES, COLS, M, FILL)
    if M.per_word == 8:
        c = _load_eight(vector, record, fill, rows, first, 2, COPIES, COLS, M, FILL)
        d = _load_eight(vector, record, fill, rows, first, 3, COPIES, COLS, M, FILL)
        x = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (COPIES, 32, 8, 4))
        x = tl.reshape(tl.permute(x, (0, 1, 3, 2)), (COPIES * 8, PART_WORDS, 2, 2, 2))
        even, odd = tl.split(x)
        one, three = tl.split(even)
        two, four = tl.split(odd)
        pairs = (one, two, three, four)
    else:
        x = tl.reshape(tl.join(a, b), (COPIES, 32, 8, 2))
        x = tl.reshape(tl.permute(x, (0, 1, 3, 2)), (COPIES * 8, PART_WORDS, 2, 2))
        pairs = tl.split(x)
    return pairs


@triton.jit
def first_inputs(vector, record, rows, begin, M: tl.constexpr, COLS: tl.constexpr):
    """Inputs of the first step, for `packed_row_sums`; none where their order is to be filled."""
    inputs = ()
    if M.order < 0:
        copies: tl.constexpr = min(rows.shape[0] * COLS // (M.per_word * 16 * 16), 4)
        inputs = _input_pairs(vector, record, record, rows, begin, copies, COLS, M, False)
    return inputs


@triton.jit
def _input_operand(pair, BLOCKS: tl.constexpr, COPIES: tl.constexpr, M: tl.constexpr):
    """Inputs of one pair as an operand [BLOCKS, 32, 8]: a part's in as many columns as it has."""
    part = tl.reshape(_operand(pair, COPIES * 8, M), (COPIES, 8, 32))
    part = tl.permute(part, (0, 2, 1))
    wide = tl.broadcast_to(part[None, :, :, :], (BLOCKS // COPIES, COPIES, 32, 8))
    return tl.reshape(wide, (BLOCKS, 32, 8))


@triton.jit
def _add_step(
    acc,
    inputs,
    word,
    scale,
    zero,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    M: tl.constexpr,
    DTYPE: tl.constexpr,
    EXACT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """acc [BLOCKS, 16, 8] and the products of one step; words as [ROWS, WORDS]."""
    codes: tl.constexpr = M.codes  # Triton 3.6 takes text as an argument from a constexpr only
    copies: tl.constexpr = min(BLOCKS, 4)
    for j in tl.static_range(M.per_word // 2):
        pair = weights_of_pair(word, scale, zero, j, codes, EXACT, DTYPE, INTERPRET)
        w = tl.reshape(tl.join(pair[0], pair[1]), (16 * BLOCKS, PART_WORDS, 2))
        w = tl.reshape(_operand(w, 16 * BLOCKS, M), (2, BLOCKS, 8, 32))
        w = tl.reshape(tl.permute(w, (1, 0, 2, 3)), (BLOCKS, 16, 32))
        acc = dot(w, _input_operand(inputs[j], BLOCKS, copies, M), acc, INTERPRET)
    return acc


@triton.jit
def packed_row_sums(
    vector,
    record,
    fill,
    rows,
    inside,
    begin,
    ahead,
    inputs,
    M: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    FILL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Dot products of `vector` with `rows` of a matrix of a record: FP32 of the shape of `rows`.

    Args:
        rows, inside, begin: of `tile_rows`.
        ahead: of `read_ahead`, its first `STEPS` steps.
        COLS: columns of a step: as many parts of 16 words as a row of the tile has.
    """
    dtype: tl.constexpr = vector.dtype.element_ty
    exact: tl.constexpr = dtype == tl.bfloat16 and M.scale_is_bfloat16
    words: tl.constexpr = COLS // M.per_word
    parts: tl.constexpr = words // PART_WORDS
    blocks: tl.constexpr = rows.shape[0] * parts // 16
    copies: tl.constexpr = min(blocks, 4)
    num_steps: tl.constexpr = (M.columns + COLS - 1) // COLS
    whole: tl.constexpr = WHOLE_ROWS and M.row_words % words == 0 and M.stride == 1
    factor = _load_factor(record, fill, rows, inside, M, FILL)
    acc = tl.zeros((blocks, 16, 8), tl.float32)
    for step in tl.static_range(num_steps):
        word, scale, zero = ahead[3 * step], ahead[3 * step + 1], ahead[3 * step + 2]
        first = begin + step * words
        if step + STEPS < num_steps:
            ahead += _read_step(record, rows, inside, first + STEPS * words, M, COLS, whole)
        if FILL:
            _fill_step(fill, rows, inside, first, word, scale, zero, M, COLS)
        x = inputs
        if step > 0 or M.order >= 0:
            x = _input_pairs(vector, record, fill, rows, first, copies, COLS, M, FILL)
        scale, zero = _factors(scale, zero, factor, M, words, exact, INTERPRET)
        word = _existing_codes(word, first, M, words)
        acc = _add_step(acc, x, word, scale, zero, blocks, parts, M, dtype, exact, INTERPRET)
    return _diagonal(acc, blocks, parts)


@triton.jit
def _diagonal(acc, BLOCKS: tl.constexpr, PARTS: tl.constexpr):
    """[BLOCKS, 16, 8] to sums of rows [ROWS]: of a row's part its inputs' column."""
    rows: tl.constexpr = 8 // PARTS
    wanted = tl.arange(0, PARTS)[:, None] == tl.arange(0, 8)[None, :]
    acc = tl.reshape(acc, (BLOCKS, 2, rows, PARTS, 8))
    acc = tl.where(wanted[None, None, None, :, :], acc, 0.0)
    sums = tl.sum(tl.reshape(acc, (BLOCKS, 2, rows, PARTS * 8)), 3)
    return tl.reshape(tl.permute(sums, (1, 0, 2)), (2 * BLOCKS * rows,))
