"""In which format each expert parameter goes into records, from its pieces' headers.

The published bits stay where all experts of a layer agree; otherwise that layer's weights are
dequantised while loading, which changes no result (a weight is rounded to the compute dtype once
either way), only their size. Knows names and shapes; moves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hotset.checkpoint.convert import stacks_rows
from hotset.checkpoint.mapping import ExpertPiece, KeyMap
from hotset.checkpoint.packed import PackedEntry
from hotset.core.formats import PLAIN, WeightFormat


def record_formats(keys: KeyMap) -> dict[str, WeightFormat]:
    """Format of each expert parameter by its full name; those of biases are left out.

    Args:
        keys: a checkpoint that `validate.check_complete` has passed.
    """
    pieces: dict[str, list[ExpertPiece]] = defaultdict(list)
    for piece in keys.pieces:
        pieces[piece.param.full_name].append(piece)
    found = {
        param.full_name: _of_pieces(pieces[param.full_name])
        for param in keys.params
        if not param.field.endswith("_bias")
    }
    return found | _without_order(keys, found)


def is_ordered(piece: ExpertPiece) -> bool:
    """Whether a quantised piece has columns that groups of GPTQ's activation order take apart."""
    return isinstance(piece.entry, PackedEntry) and piece.entry.format.weights.has_order


def _of_pieces(pieces: list[ExpertPiece]) -> WeightFormat:
    """The format that all pieces of a parameter agree in, else plain."""
    formats = {
        piece.entry.format.weights if isinstance(piece.entry, PackedEntry) else PLAIN
        for piece in pieces
    }
    if len(formats) > 1 or not all(_keeps_rows(piece) for piece in pieces):
        return PLAIN
    return formats.pop()


def _keeps_rows(piece: ExpertPiece) -> bool:
    """Whether rows of codes are rows of the record, in whatever order."""
    if piece.expert is None:
        turned = isinstance(piece.entry, PackedEntry) and piece.entry.format.is_transposed
        # Codes of a transposed parameter are rows of the record only where the format turns them.
        in_rows = turned == piece.param.transposed
        return piece.converter is None and in_rows and _splits_evenly(piece)
    plain = not piece.param.transposed and not piece.param.interleaved
    return plain and piece.converter is not None and stacks_rows(piece.converter)


def _splits_evenly(piece: ExpertPiece) -> bool:
    """Whether no scale is shared by rows of gate and up, where a tensor holds both."""
    if not isinstance(piece.entry, PackedEntry) or not piece.param.name.startswith("gate_up"):
        return True
    shared, num_rows = piece.entry.format.weights.scale_rows, piece.param.as_linear().shape[1]
    return shared is not None and num_rows // 2 % shared == 0


def _without_order(keys: KeyMap, found: dict[str, WeightFormat]) -> dict[str, WeightFormat]:
    """Formats of second projections whose columns lie in another order.

    Their columns are put in order by permuting the rows of the first projection. That needs rows
    with scales of their own, and no bias beside them.
    """
    changed: dict[str, WeightFormat] = {}
    by_module: dict[str, dict[str, str]] = defaultdict(dict)
    for param in keys.params:
        by_module[param.module][param.field] = param.full_name
    for names in by_module.values():
        down = found[names["down"]]
        if down.has_order:
            up = found[names["up"]]
            can = not up.is_plain and up.scale_rows == 1 and "up_bias" not in names
            changed[names["down"]] = replace(down, has_order=False) if can else PLAIN
    return changed
