"""Weights as a state dict that reads itself: for `from_pretrained(state_dict=...)`.

The library renames, converts, casts and places; only the reading is ours. So experts are not even
looked at, shards need no index file, a damaged tensor is named together with its file, and no
file stays mapped. Knows nothing of the module tree.
"""

from __future__ import annotations

from collections import defaultdict
from threading import Lock
from types import EllipsisType

import torch

from hotset.checkpoint.index import TensorEntry
from hotset.checkpoint.mapping import ExpertPiece, KeyMap
from hotset.checkpoint.packed import PackedEntry, dequantise_entry
from hotset.checkpoint.params import ExpertParam, as_in_module
from hotset.checkpoint.reader import ShardReader


class LazyTensor:
    """A tensor that is read when it is indexed with `...`, as a safetensors slice is.

    Args:
        entry: a tensor of the files; a quantised one is dequantised when it is read.
        reader: of the files.
        dtype: what quantised weights are rounded to.
        turn: held while one is dequantised. The library reads several tensors at once, and a large
            matrix in float32 is many times its codes.

    Attributes:
        shape, dtype: of the tensor that is read.
    """

    def __init__(
        self, entry: TensorEntry, reader: ShardReader, *, dtype: torch.dtype, turn: Lock
    ) -> None:
        self._entry = entry
        self._reader = reader
        self._turn = turn
        self.shape = torch.Size(entry.shape)
        is_packed = isinstance(entry, PackedEntry)
        self.dtype: torch.dtype = dtype if is_packed else getattr(torch, entry.dtype)

    def __getitem__(self, item: EllipsisType) -> torch.Tensor:
        """The whole tensor, in memory of its own.

        Raises:
            CheckpointError: unreadable, or holding NaN, Inf or scales that no weight has.
        """
        assert item is ...
        if isinstance(self._entry, PackedEntry):
            with self._turn:
                return dequantise_entry(self._reader, self._entry, self.dtype)
        return read_tensor(self._reader, self._entry)


class _LazyExperts:
    """A parameter of all experts, put together from tensors of one each when it is read.

    Args:
        param: as the library has it.
        pieces: linear layers of it.
        tensors: by the names of the pieces.
    """

    def __init__(
        self, param: ExpertParam, pieces: list[ExpertPiece], tensors: dict[str, LazyTensor]
    ) -> None:
        self._param, self._pieces, self._tensors = param, pieces, tensors
        self.shape = torch.Size(param.shape)
        self.dtype = tensors[pieces[0].entry.name].dtype

    def __getitem__(self, item: EllipsisType) -> torch.Tensor:
        """The whole parameter, in memory of its own."""
        assert item is ...
        made = torch.empty(self._param.as_linear().shape, dtype=self.dtype)
        for piece in self._pieces:
            assert piece.converter is not None and piece.expert is not None
            num_parts = len(piece.converter.source_patterns)
            rows = made[piece.expert].unflatten(0, (num_parts, -1))[piece.part]
            rows.copy_(self._tensors[piece.entry.name][...])
        if self._param.as_linear() == self._param:
            return made
        ordered = [as_in_module(expert, self._param) for expert in made]
        return torch.stack(ordered).reshape(self.shape)


def read_tensor(reader: ShardReader, entry: TensorEntry) -> torch.Tensor:
    """Reads one tensor and requires that it is finite.

    Raises:
        CheckpointError: unreadable, or holding NaN or Inf; names tensor and file.
    """
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    reader.read_checked(entry, entry.offset, tensor)
    return tensor


def resident_state_dict(
    key_map: KeyMap, reader: ShardReader, *, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """The resident tensors of a checkpoint under their names in the files.

    Args:
        key_map: the checkpoint, classified.
        reader: must stay open until the library has loaded them; its threads may share it.
        dtype: what quantised weights are rounded to.
    """
    return _lazy([tensor.entry for tensor in key_map.core], reader, dtype)


def whole_state_dict(
    key_map: KeyMap, reader: ShardReader, *, dtype: torch.dtype
) -> dict[str, LazyTensor | _LazyExperts]:
    """The same with the experts: what the stock model is loaded from.

    Those that the library knows only as one tensor of all experts are that here.
    """
    entries = [tensor.entry for tensor in key_map.core]
    entries += [piece.entry for piece in key_map.pieces if not piece.foreign]
    apart: dict[str, list[ExpertPiece]] = defaultdict(list)
    for piece in key_map.pieces:
        if piece.foreign:
            apart[piece.param.full_name].append(piece)
    put_together = {
        param.full_name: _LazyExperts(
            param,
            apart[param.full_name],
            _lazy([piece.entry for piece in apart[param.full_name]], reader, dtype),
        )
        for param in key_map.params
        if param.full_name in apart
    }
    return _lazy(entries, reader, dtype) | put_together


def _lazy(
    entries: list[TensorEntry], reader: ShardReader, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    turn = Lock()
    return {entry.name: LazyTensor(entry, reader, dtype=dtype, turn=turn) for entry in entries}
