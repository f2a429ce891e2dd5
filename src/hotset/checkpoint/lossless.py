"""Packs BF16 weights into the lossless format: about 12 bits a weight, every bit kept.

Knows one matrix (or some rows of it) and the fields of its record, on any device; see
`core.formats.lossless_fields` for what they hold. Reads no files and decides for no model.
"""

from __future__ import annotations

import numpy as np
import torch

from hotset.core.formats import LOSSLESS_GROUP, LOSSLESS_MOST_RARE, LOSSLESS_WINDOW

Fields = dict[str, torch.Tensor]

# Elements that are worked on at a time on a CPU: all steps of one part find it in a core's cache,
# and torch does not cut it up for threads of its own beside the loader's.
_PART_ELEMENTS = 32 * 1024 - 1
# A row with more rare weights than this share may have large outliers: another window may do.
_MANY_RARE = 1 / 256


def pack_lossless(weights: torch.Tensor, fields: Fields, name: str, *, first_row: int = 0) -> bool:
    """Writes rows of a matrix into the fields of its record.

    Args:
        weights: BF16 [n, K], contiguous, on the device of the fields.
        fields: writable views of the record's fields.
        name: `up` or `down`.
        first_row: which row of the record the first one is. Rows that are packed apart have parts
            of the table of their own, so several threads may pack one matrix.

    Returns:
        Whether all rare weights found room; where not, what was written is of no use.
    """
    assert weights.dtype == torch.bfloat16 and weights.is_contiguous()
    num_rows, columns = weights.shape
    rows = slice(first_row, first_row + num_rows)
    data, words = fields[name][rows], fields[f"{name}_exponent"][rows].view(torch.int32)
    base = torch.empty(num_rows, dtype=torch.int16, device=weights.device)
    step = max(1, _PART_ELEMENTS // columns) if weights.device.type == "cpu" else num_rows
    for start in range(0, num_rows, step):
        part = slice(start, start + step)
        base[part] = _pack_rows(weights[part], data[part], words[part])
    rare = _rare(words)
    many = (torch.bincount(rare[:, 0], minlength=num_rows) > columns * _MANY_RARE).nonzero()[:, 0]
    if len(many):
        base[many], words[many] = _of_best_base(weights[many])
        rare = _rare(words)
    places = fields[f"{name}_rare"].shape[1]
    table = fields[f"{name}_rare"].view(-1)[first_row * places : (first_row + num_rows) * places]
    firsts = _place_rare(weights, rare, data, table)
    if firsts is None:
        return False
    fields[f"{name}_row"][rows] = base | (firsts + first_row * places) << 8
    return True


def _pack_rows(weights: torch.Tensor, data: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Writes bytes and codes of some rows; the base of each, int16 [N]."""
    bits = weights.view(torch.int16)
    columns = bits.shape[1]
    exponent = (bits >> 7).bitwise_and_(0xFF)
    base = (exponent.amax(1) - LOSSLESS_WINDOW).clamp_(min=0)
    words.copy_(_words_of((exponent - base[:, None]).clamp_(min=0)))
    data[:, :columns].copy_((bits >> 8).bitwise_and_(0x80).bitwise_or_(bits & 0x7F))
    data[:, columns:].zero_()
    return base


def _of_best_base(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(base [N], words [N, groups]) of rows [N, K] with the base whose window of exponents has most
    of a row's weights."""
    exponent = (weights.view(torch.int16) >> 7).bitwise_and_(0xFF)
    counts = torch.zeros(len(exponent), 256, dtype=torch.int32, device=exponent.device)
    counts.scatter_add_(1, exponent.long(), torch.ones_like(exponent, dtype=torch.int32))
    below = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    # Exponents base + 1 to base + 15. That of 255 is no number's.
    window = below[:, 1 + LOSSLESS_WINDOW : 256] - below[:, 1 : 256 - LOSSLESS_WINDOW]
    base = window.argmax(1).to(exponent.dtype)
    code = exponent - base[:, None]
    code.masked_fill_((code < 0) | (code > LOSSLESS_WINDOW), 0)
    return base, _words_of(code).int()


def _words_of(code: torch.Tensor) -> torch.Tensor:
    """Codes int16 [N, K] to a word of each group, in the low half of int64 [N, groups]; padded with
    code 15."""
    pad = -code.shape[1] % LOSSLESS_GROUP
    if pad:
        code = torch.nn.functional.pad(code, (0, pad), value=LOSSLESS_WINDOW)
    # Four columns to 64 bits, as they lie, to the bits 0, 16, 4 and 20 of 32; then two of these.
    fours = code.view(torch.int64)
    halves = (fours | fours >> 28).int().view(torch.int64)
    return halves | halves >> 24


def _zero_codes(words: torch.Tensor) -> torch.Tensor:
    """Not 0 where one of a word's codes is 0."""
    return (words - 0x11111111) & ~words & -0x77777778


def _places(mask: torch.Tensor) -> torch.Tensor:
    """Where a tensor is not 0, of its elements in order, int64."""
    if mask.device.type == "cpu":  # where torch takes 100 times as long
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.flatten().nonzero()[:, 0]


def _rare(words: torch.Tensor) -> torch.Tensor:
    """(row, column) of each code of 0 [R, 2], in order."""
    where = _places(_zero_codes(words))
    shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], device=words.device)
    codes = words.flatten()[where][:, None].long() >> shifts & 0xF
    which, column = (codes == 0).nonzero().unbind(1)
    groups = words.shape[1]
    row, group = where[which] // groups, where[which] % groups
    return torch.stack([row, group * LOSSLESS_GROUP + column], 1)


def _place_rare(
    weights: torch.Tensor, rare: torch.Tensor, data: torch.Tensor, table: torch.Tensor
) -> torch.Tensor | None:
    """Writes the table, and for each rare weight its number.

    Args:
        rare: (row, column) [R, 2].
        table: of these rows together.

    Returns:
        Where each row's part begins, int32 [N]; `None` where the table is too small, or a row has
        more different ones than a byte can number.
    """
    row, column = rare.unbind(1)
    bits = weights.view(torch.int16)[row, column].long() & 0xFFFF
    distinct, which = torch.unique(row << 16 | bits, return_inverse=True)
    rows = torch.arange(len(weights) + 1, device=weights.device)
    firsts = torch.searchsorted(distinct, rows << 16)
    if len(distinct) > len(table) or int(firsts.diff().amax()) > LOSSLESS_MOST_RARE:
        return None
    table.zero_()
    table[: len(distinct)] = (distinct & 0xFFFF).to(torch.int16)
    data[row, column] = (which - firsts[row]).to(torch.uint8)
    return firsts[:-1].int()
