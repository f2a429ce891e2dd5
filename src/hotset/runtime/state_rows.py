"""States of fixed size, one for each row of the KV pool, and the library's view of them.

A row's state is one run of bytes, all layers side by side, so that a step fetches and puts back the
states of its rows with one gather and one scatter, whatever the number of layers. A prompt works on
its row where it lies; a decode step works on copies at addresses that never move, because which
rows it serves is data. Knows the library's `LinearAttentionLayer`; nothing of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from transformers.cache_utils import LinearAttentionLayer

from hotset.core.geometry import StateLayer
from hotset.core.record import align_up

# States begin at whole transactions of the memory, and at what any kernel's loads ask for.
_ALIGN_BYTES = 128
# Rows are gathered in words, not in bytes: the same copy in an eighth of the elements.
_WORD_BYTES = torch.int64.itemsize

# (kind, number) of a `StateTensor` -> [rows, ...]
StateTensors = dict[tuple[str, int], torch.Tensor]


class StateRows:
    """The states of all rows, one more for padding, and what decode steps work on.

    Args:
        layers: what `find_attention` found; may be empty.
        num_rows: of the pool.
        num_places: most places of a decode step.
        device: of the states.
        poison: fill what no row owns with NaN, so that reading what was not written shows.
    """

    def __init__(
        self,
        layers: Sequence[StateLayer],
        *,
        num_rows: int,
        num_places: int,
        device: torch.device,
        poison: bool = False,
    ) -> None:
        self.layers = {layer.index: layer for layer in layers}
        self._offsets, row_bytes = _layout(layers)
        words = row_bytes // _WORD_BYTES
        # Zeros: what padding computes with is finite.
        self._rows_RW = torch.zeros(num_rows + 1, words, dtype=torch.int64, device=device)
        self._places_BW = torch.zeros(num_places, words, dtype=torch.int64, device=device)
        self._poison = poison
        if poison:
            self._rows_RW[:num_rows].fill_(_NAN_WORD)

    @property
    def nbytes(self) -> int:
        """Equal to what `state_bytes` says beforehand."""
        return self._rows_RW.nbytes + self._places_BW.nbytes

    def row(self, index: int, row: int) -> StateTensors:
        """One layer's state of one row, where it lies: [1, ...]."""
        return self._tensors(index, self._rows_RW[row : row + 1])

    def places(self, index: int, size: int) -> StateTensors:
        """One layer's states of a decode step's places, [B, ...]; they never move. Steps of all
        sizes use the same ones, since one runs at a time.

        Each is a tensor of its own to torch, though their bytes lie side by side: a layer writes
        to several, and the compiler refuses to when they are views of one.
        """
        assert size <= len(self._places_BW), (size, len(self._places_BW))
        tensors = self._tensors(index, self._places_BW[:size])
        return {key: from_dlpack(tensor) for key, tensor in tensors.items()}

    def fetch(self, rows_B: torch.Tensor) -> None:
        """Copies the states of rows into the places; part of a captured step.

        Args:
            rows_B: int64, the row in each place, `num_rows` for padding.
        """
        if self.layers:
            torch.index_select(self._rows_RW, 0, rows_B, out=self._places_BW[: len(rows_B)])

    def put_back(self, rows_B: torch.Tensor) -> None:
        """Copies the states in the places back into their rows; part of a captured step. Of
        several padded places, any one's state stays."""
        if self.layers:
            self._rows_RW.index_copy_(0, rows_B, self._places_BW[: len(rows_B)])

    def close(self, row: int) -> None:
        """A row is given back. Its state is never read again: a prompt begins with none."""
        if self._poison and self.layers:
            self._rows_RW[row].fill_(_NAN_WORD)

    def _tensors(self, index: int, words_RW: torch.Tensor) -> StateTensors:
        tensors = {}
        for tensor in self.layers[index].tensors:
            dtype = getattr(torch, tensor.dtype)
            start = self._offsets[index, tensor.kind, tensor.number] // dtype.itemsize
            flat = words_RW.view(dtype)[:, start : start + prod(tensor.shape)]
            tensors[tensor.kind, tensor.number] = flat.unflatten(1, tensor.shape)
        return tensors


class StateView(LinearAttentionLayer):
    """The library's layer over tensors that are there before its first forward.

    Args:
        tensors: of one layer.
        begun: they hold the state of what came before; otherwise nothing came before.
    """

    def __init__(self, tensors: StateTensors, *, begun: bool) -> None:
        count = 1 + max(number for _, number in tensors)
        LinearAttentionLayer.__init__(self, number_of_states=count)
        for (kind, number), tensor in tensors.items():
            if kind == "conv":
                self.conv_states[number] = tensor
                self.conv_kernel_size[number] = tensor.shape[-1]
                self.is_conv_states_initialized[number] = True
            else:
                self.recurrent_states[number] = tensor
                self.is_recurrent_states_initialized[number] = True
        self.has_previous_state = dict.fromkeys(range(count), begun)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a state that was not found when the model was looked at")


def state_bytes(layers: Sequence[StateLayer], *, num_rows: int, num_places: int) -> int:
    """Bytes of `StateRows` with these arguments."""
    return (num_rows + 1 + num_places) * _layout(layers)[1]


# All bits set: NaN in every float format.
_NAN_WORD = -1


def _layout(layers: Sequence[StateLayer]) -> tuple[dict[tuple[int, str, int], int], int]:
    """(index, kind, number) -> offset in bytes within a row, and the bytes of a row."""
    offsets, end = {}, 0
    for layer in layers:
        for tensor in layer.tensors:
            offsets[layer.index, tensor.kind, tensor.number] = end
            num_bytes = prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize
            end = align_up(end + num_bytes, _ALIGN_BYTES)
    return offsets, end
