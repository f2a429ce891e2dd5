"""Compares every record with its checkpoint, by another road than the loader's.

The loader reads files itself and writes rows where they belong. The audit reads through the
safetensors library, always runs the library's own conversion, rearranges by indexing, and compares
bytes. It shares neither the reading nor the placing with what it checks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hotset.checkpoint.convert import convert_expert
from hotset.checkpoint.mapping import ExpertPiece, KeyMap

# (layer, expert) -> views of the record's fields by name
Fields = Callable[[int, int], dict[str, torch.Tensor]]


def audit_records(keys: KeyMap, fields: Fields) -> Iterator[str]:
    """One sentence for every record field that differs from the checkpoint; none when all agree.

    Args:
        keys: the checkpoint, classified and complete.
        fields: the records to check; a cast to their dtype is part of what is expected.
    """
    pieces: dict[str, list[ExpertPiece]] = defaultdict(list)
    for piece in keys.pieces:
        pieces[piece.param.full_name].append(piece)
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        for file in {piece.entry.file for piece in keys.pieces}:
            handles[file] = stack.enter_context(safe_open(file, "pt"))
        for param in keys.params:
            for expert in range(param.shape[0]):
                want = _expected(pieces[param.full_name], expert, handles)
                record = fields(param.layer, expert)[param.field]
                if not _same_bytes(want.to(record.dtype), record):
                    yield f"`{param.full_name}` of expert {expert} differs from the checkpoint"


def _expected(pieces: list[ExpertPiece], expert: int, handles: dict[Path, Any]) -> torch.Tensor:
    """One expert's tensor in record order, in the checkpoint's dtype."""
    mine = [piece for piece in pieces if piece.expert in (None, expert)]
    first = mine[0]
    tensors: dict[int, torch.Tensor] = {}
    for piece in mine:
        handle = handles[piece.entry.file]
        name = piece.entry.name
        fused = piece.expert is None
        tensors[piece.part] = (
            handle.get_slice(name)[expert : expert + 1] if fused else handle.get_tensor(name)
        )
    if first.converter is None:
        tensor = tensors[0]
    else:
        patterns = first.converter.source_patterns
        sources = {patterns[part]: tensor for part, tensor in tensors.items()}
        tensor = convert_expert(first.converter, sources, first.param)
    tensor = tensor.reshape(first.param.shape[1:])
    if first.param.transposed:
        tensor = tensor.T
    if first.param.interleaved:
        tensor = torch.cat([tensor[0::2], tensor[1::2]])
    return tensor.contiguous()


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    # Bytes and not values: -0.0 equals 0.0, and a NaN differs from itself.
    return torch.equal(left.view(torch.uint8), right.contiguous().view(torch.uint8))
