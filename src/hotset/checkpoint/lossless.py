"""Packs BF16 weights into the lossless format: about 12 bits a weight, every bit kept.

Knows one matrix (or some rows of it) and the fields of its record, on any device; see
`core.formats.lossless_fields` for what they hold. Reads no files and decides for no model.
"""

from __future__ import annotations

import torch

from hotset.core.formats import LOSSLESS_GROUP, LOSSLESS_MOST_RARE, LOSSLESS_WINDOW

Fields = dict[str, torch.Tensor]

# Elements that are worked on at a time: all steps of one part find it in a core's cache.
_PART_ELEMENTS = 64 * 1024
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
    bases = torch.empty(num_rows, dtype=torch.int32, device=weights.device)
    found: list[torch.Tensor] = []
    step = max(1, _PART_ELEMENTS // columns) if weights.device.type == "cpu" else num_rows
    for start in range(0, num_rows, step):
        part = slice(start, start + step)
        bases[part], rare = _pack_rows(weights[part], data[part], words[part])
        found.append(rare + torch.tensor([start, 0], device=weights.device))
    places = fields[f"{name}_rare"].shape[1]
    table = fields[f"{name}_rare"].view(-1)[first_row * places : (first_row + num_rows) * places]
    firsts = _place_rare(weights, torch.cat(found), data, table)
    if firsts is None:
        return False
    fields[f"{name}_row"][rows] = bases | (firsts + first_row * places) << 8
    return True


def _pack_rows(
    weights: torch.Tensor, data: torch.Tensor, words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes bytes and codes of some rows.

    Returns:
        (base of each row, (row, column) of each rare weight [R, 2]).
    """
    bits = weights.view(torch.int16)
    exponent = (bits >> 7).bitwise_and_(0xFF)
    base = (exponent.amax(1) - LOSSLESS_WINDOW).clamp_(min=0)
    code = exponent - base[:, None]
    rare_rows = (code < 1).sum(1)
    many = (rare_rows > bits.shape[1] * _MANY_RARE).nonzero()[:, 0]
    if len(many):
        base[many] = _best_base(exponent[many])
        code[many] = exponent[many] - base[many][:, None]
        code.masked_fill_(code > LOSSLESS_WINDOW, 0)
    code.clamp_(min=0)
    numbers = (bits >> 8).bitwise_and_(0x80).bitwise_or_(bits & 0x7F)
    columns = bits.shape[1]
    data[:, :columns].copy_(numbers)
    data[:, columns:].zero_()
    words.copy_(_words_of(code))
    return base.int(), (code == 0).nonzero()


def _best_base(exponent: torch.Tensor) -> torch.Tensor:
    """The base of each row [N] whose window of exponents has most of its weights."""
    counts = torch.zeros(len(exponent), 256, dtype=torch.int32, device=exponent.device)
    counts.scatter_add_(1, exponent.long(), torch.ones_like(exponent, dtype=torch.int32))
    below = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    # Exponents base + 1 to base + 15. That of 255 is no number's.
    window = below[:, 1 + LOSSLESS_WINDOW : 256] - below[:, 1 : 256 - LOSSLESS_WINDOW]
    best: torch.Tensor = window.argmax(1).to(exponent.dtype)
    return best


def _words_of(code: torch.Tensor) -> torch.Tensor:
    """Codes int16 [N, K] to a word of each group, int32 [N, groups]; padded with code 15."""
    pad = -code.shape[1] % LOSSLESS_GROUP
    if pad:
        code = torch.nn.functional.pad(code, (0, pad), value=LOSSLESS_WINDOW)
    # Two columns to 32 bits, as they lie: the even one at bit 0, the odd one at bit 16.
    pairs = code.view(torch.int32).unflatten(1, (-1, LOSSLESS_GROUP // 2))
    words: torch.Tensor = pairs[..., 0] | pairs[..., 1] << 4
    words |= (pairs[..., 2] | pairs[..., 3] << 4) << 8
    return words


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
