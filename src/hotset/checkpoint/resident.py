"""Weights as a state dict that reads itself: for `from_pretrained(state_dict=...)`.

The library renames, converts, casts and places; only the reading is ours. So experts are not even
looked at, shards need no index file, a damaged tensor is named together with its file, and no
file stays mapped. Knows nothing of the module tree.
"""

from __future__ import annotations

from types import EllipsisType

import torch

from hotset.checkpoint.finite import is_finite
from hotset.checkpoint.index import TensorEntry
from hotset.checkpoint.mapping import KeyMap
from hotset.checkpoint.reader import ShardReader
from hotset.core.errors import CheckpointError


class LazyTensor:
    """A tensor that is read when it is indexed with `...`, as a safetensors slice is.

    Attributes:
        shape, dtype: of the tensor in the file.
    """

    def __init__(self, entry: TensorEntry, reader: ShardReader) -> None:
        self._entry = entry
        self._reader = reader
        self.shape = torch.Size(entry.shape)
        self.dtype: torch.dtype = getattr(torch, entry.dtype)

    def __getitem__(self, item: EllipsisType) -> torch.Tensor:
        """The whole tensor, in memory of its own.

        Raises:
            CheckpointError: unreadable, or holding NaN or Inf.
        """
        assert item is ...
        return read_tensor(self._reader, self._entry)


def read_tensor(reader: ShardReader, entry: TensorEntry) -> torch.Tensor:
    """Reads one tensor and requires that it is finite.

    Raises:
        CheckpointError: unreadable, or holding NaN or Inf; names tensor and file.
    """
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    reader.read_into(entry.file, entry.offset, tensor)
    require_finite(tensor, entry)
    return tensor


def require_finite(tensor: torch.Tensor, entry: TensorEntry) -> None:
    """Requires that what was read of a checkpoint tensor holds no NaN or Inf.

    Raises:
        CheckpointError: names tensor and file.
    """
    if not is_finite(tensor):
        raise CheckpointError(
            f"tensor `{entry.name}` in `{entry.file}` holds NaN or Inf",
            hint="the file is damaged or was written wrongly; download it again",
        )


def resident_state_dict(key_map: KeyMap, reader: ShardReader) -> dict[str, LazyTensor]:
    """The resident tensors of a checkpoint under their names in the files.

    Args:
        key_map: the checkpoint, classified.
        reader: must stay open until the library has loaded them; its threads may share it.
    """
    return {t.entry.name: LazyTensor(t.entry, reader) for t in key_map.core}


def whole_state_dict(key_map: KeyMap, reader: ShardReader) -> dict[str, LazyTensor]:
    """The same with the experts: what the stock model is loaded from."""
    experts = {piece.entry.name: LazyTensor(piece.entry, reader) for piece in key_map.pieces}
    return resident_state_dict(key_map, reader) | experts
