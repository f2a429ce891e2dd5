"""The states of fixed size that a stock model's layers carry: convolutions, recurrences.

Found in the library's own caches after forwards of two lengths. What grows with the text is no
state. Knows the library's cache layers and which module asks for them; nothing of pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import (
    Cache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from hotset.core.geometry import StateLayer, StateTensor

# Kinds of cache layers whose states are tensors that are overwritten in place. The latter two keep
# keys and values as well.
STATE_LAYERS = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


class LayerWatch:
    """Which module of a model asks its cache for a state.

    Attributes:
        paths: index in the cache -> path of the innermost module that knows its layer's index.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if isinstance(getattr(module, "layer_idx", None), int)
        }
        self._running: list[str] = []
        self.paths: dict[int, str] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block the model's forwards are followed."""
        hooks = []
        for name, module in self._modules.items():

            def enter(*_: Any, name: str = name) -> None:
                self._running.append(name)

            def leave(*_: Any) -> None:
                self._running.pop()

            hooks += [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(leave, always_call=True),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def asked(self, index: int) -> None:
        """A state of this layer is asked for now."""
        if self._running:
            self.paths[index] = self._running[-1]


def find_states(cache: Cache, other: Cache, paths: dict[int, str]) -> tuple[StateLayer, ...]:
    """The states in a cache after a forward.

    Args:
        cache, other: after forwards of different lengths, of one sequence.
        paths: of the modules, by index (`LayerWatch`).

    Raises:
        ValueError: a state that depends on the length, or on the sequence in some other way than
            by its first dimension; with the reason.
    """
    found = []
    for index, (layer, beside) in enumerate(zip(cache.layers, other.layers, strict=True)):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        tensors, others = _tensors(layer), _tensors(beside)
        if {key: t.shape for key, t in tensors.items()} != {k: t.shape for k, t in others.items()}:
            raise ValueError(f"layer {index} carries a state whose size depends on the text")
        if any(tensor.shape[0] != 1 for tensor in tensors.values()):
            raise ValueError(f"layer {index} carries a state that is not one for each sequence")
        if not tensors:
            continue
        if index not in paths:
            raise ValueError(f"layer {index} carries a state, and no module of that index asks")
        found.append(
            StateLayer(
                path=paths[index],
                index=index,
                tensors=tuple(
                    StateTensor(
                        kind=kind,
                        number=number,
                        shape=tuple(tensor.shape[1:]),
                        dtype=str(tensor.dtype).removeprefix("torch."),
                    )
                    for (kind, number), tensor in tensors.items()
                ),
            )
        )
    return tuple(found)


def _tensors(layer: Any) -> dict[tuple[str, int], torch.Tensor]:
    """(kind, number) -> tensor [1, ...] of one cache layer; those that the model never set miss."""
    states = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    return {
        (kind, number): tensor
        for kind, tensors in states.items()
        for number, tensor in tensors.items()
        if tensor is not None
    }
