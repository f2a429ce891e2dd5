"""Compares every record with its checkpoint, by another road than the loader's.

The loader reads files itself and writes rows where they belong. The audit reads through the
safetensors library, always runs the library's own conversion, rearranges by indexing, and compares
bytes. Quantised weights are unpacked on both sides, from the files by the published formula and
from the record by the kernels' specification, and their values compared. It shares neither the
reading nor the placing with what it checks. Lossless weights are unpacked and compared as bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hotset.checkpoint.convert import convert_expert
from hotset.checkpoint.mapping import ExpertPiece, KeyMap
from hotset.checkpoint.packed import PackedEntry, dequantised
from hotset.checkpoint.params import ExpertParam
from hotset.checkpoint.record_formats import is_ordered
from hotset.core.geometry import ExpertSpec
from hotset.kernels.dequantise import dequantise_matrix, unpack_lossless

# (layer, expert) -> views of the record's fields by name
Fields = Callable[[int, int], dict[str, torch.Tensor]]
# A field's name and an expert's whole tensor -> the part of it that a record holds
Part = Callable[[str, torch.Tensor], torch.Tensor]

# A published divisor is kept as its reciprocal: that, and each of the two products, is rounded once
# on either side. Relative, FP32.
_RECIPROCAL_ERROR = 4 * torch.finfo(torch.float32).eps


def audit_records(
    keys: KeyMap, fields: Fields, experts: Sequence[ExpertSpec], *, part: Part | None = None
) -> Iterator[str]:
    """One sentence for every record field that differs from the checkpoint; none when all agree.

    Args:
        keys: the checkpoint, classified and complete.
        fields: the records to check; a cast to their dtype is part of what is expected.
        experts: what the experts of each MoE layer look like.
        part: of plain weights, where a record holds no whole expert.
    """
    pieces: dict[str, list[ExpertPiece]] = defaultdict(list)
    for piece in keys.pieces:
        pieces[piece.param.full_name].append(piece)
    down_names = {param.layer: param.full_name for param in keys.params if param.field == "down"}
    with ExitStack() as stack:
        files = _Files(stack)
        for param in keys.params:
            for expert in range(param.shape[0]):
                mine = _of_expert(pieces[param.full_name], expert)
                down = _of_expert(pieces[down_names[param.layer]], expert)[0]
                record = fields(param.layer, expert)
                want = _expected(mine, expert, files)
                want = _as_ordered(want, param, files, expert, record, down)
                want = want if part is None else part(param.field, want)
                if not _agrees(want, record, param, experts[param.layer], mine):
                    yield f"`{param.full_name}` of expert {expert} differs from the checkpoint"


class _Files:
    """The shards through the safetensors library, each opened once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._handles: dict[Path, Any] = {}

    def read(self, file: Path, name: str, expert: int | None) -> torch.Tensor:
        """A tensor, or one expert's slice [1, ...] of one that holds all."""
        if file not in self._handles:
            self._handles[file] = self._stack.enter_context(safe_open(file, "pt"))
        handle = self._handles[file]
        tensor: torch.Tensor = (
            handle.get_tensor(name)
            if expert is None
            else handle.get_slice(name)[expert : expert + 1]
        )
        return tensor

    def read_parts(self, entry: PackedEntry, expert: int | None) -> dict[str, torch.Tensor]:
        """All tensors of a quantised matrix by suffix."""
        read = {name: self.read(p.file, p.name, expert) for name, p in entry.parts.items()}
        return read if expert is None else {name: tensor[0] for name, tensor in read.items()}


def _of_expert(pieces: list[ExpertPiece], expert: int) -> list[ExpertPiece]:
    return [piece for piece in pieces if piece.expert in (None, expert)]


def _expected(mine: list[ExpertPiece], expert: int, files: _Files) -> torch.Tensor:
    """One expert's tensor in record order, in the checkpoint's dtype; dequantised in float32."""
    first = mine[0]
    tensors: dict[int, torch.Tensor] = {}
    for piece in mine:
        entry = piece.entry
        index = expert if piece.expert is None else None
        if isinstance(entry, PackedEntry):
            matrix = dequantised(entry, files.read_parts(entry, index))
            tensors[piece.part] = matrix if index is None else matrix[None]
        else:
            tensors[piece.part] = files.read(entry.file, entry.name, index)
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


def _as_ordered(
    want: torch.Tensor,
    param: ExpertParam,
    files: _Files,
    expert: int,
    record: dict[str, torch.Tensor],
    down: ExpertPiece,
) -> torch.Tensor:
    """Intermediate rows and columns as a record has them whose second projection is ordered."""
    if not is_ordered(down) or "down_scale" not in record:
        return want
    assert isinstance(down.entry, PackedEntry)
    parts = files.read_parts(down.entry, None if down.expert is not None else expert)
    order = down.entry.format.companions(parts)["_order"].long()
    if param.field == "down":
        return want[:, order]
    halves: torch.Tensor = want.unflatten(0, (-1, len(order)))
    return halves[:, order].flatten(0, 1)


def _agrees(
    want: torch.Tensor,
    record: dict[str, torch.Tensor],
    param: ExpertParam,
    spec: ExpertSpec,
    mine: list[ExpertPiece],
) -> bool:
    name = param.field
    if f"{name}_exponent" in record:
        unpacked = unpack_lossless(record, name, columns=want.shape[1])
        return _same_bytes(want.to(unpacked.dtype), unpacked)
    if f"{name}_scale" not in record:
        return _same_bytes(want.to(record[name].dtype), record[name])
    is_up = name == "up"
    got = dequantise_matrix(
        record,
        name,
        spec.up_format if is_up else spec.down_format,
        halves=2 if is_up and spec.gate.has_gate else 1,
        columns=spec.hidden if is_up else spec.intermediate,
    )
    entries = [piece.entry for piece in mine]
    if any(isinstance(entry, PackedEntry) and entry.format.divides for entry in entries):
        return bool(((got - want).abs() <= _RECIPROCAL_ERROR * want.abs()).all())
    return torch.equal(got, want)


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    # Bytes and not values: -0.0 equals 0.0, and a NaN differs from itself.
    return torch.equal(left.view(torch.uint8), right.contiguous().view(torch.uint8))
