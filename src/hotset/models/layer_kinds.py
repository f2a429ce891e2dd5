"""Which decoder layers of a stock model are alike, so that one of each kind can stand for all.

Two layers are of one kind when their modules agree in class, in parameter shapes and in every
plain attribute but the layer's own index. Used only to make measuring on the meta device fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from hotset.models.seam import experts_modules

_INDEX_NAMES = ("layer_idx", "layer_id", "layer_index", "layer_number")


class LayerKinds:
    """The decoder layers of a model, by kind.

    Attributes:
        kind: for each layer the index of the first layer of its kind.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = decoder_layers(model)
        first: dict[object, int] = {}
        self.kind = [
            first.setdefault(_signature(layer), index) for index, layer in enumerate(self._layers)
        ]
        # By kind: what a layer returns after the hidden states, `None` when it returns only those.
        self._rest: dict[int, tuple[Any, ...] | None] = {}

    @property
    def first_of_each(self) -> list[int]:
        return sorted(set(self.kind))

    @contextmanager
    def only(self, indices: Sequence[int]) -> Iterator[None]:
        """Within the block the other layers hand on what they are given.

        They stay in the list, because stock code picks masks and positions by place in it. Each
        kind must have run once before all its layers are left out: only then is known what it
        returns besides the hidden states.
        """
        for index, (layer, kind) in enumerate(zip(self._layers, self.kind, strict=True)):
            layer.forward = (
                self._record(kind, layer.forward) if index in indices else self._skip(kind)
            )
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward  # the class's own shows again

    def _record(self, kind: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            self._rest[kind] = out[1:] if isinstance(out, tuple) else None
            return out

        return recorded

    def _skip(self, kind: int) -> Callable[..., Any]:
        def skipped(*args: Any, **kwargs: Any) -> Any:
            hidden, rest = args[0] if args else kwargs["hidden_states"], self._rest[kind]
            return hidden if rest is None else (hidden, *rest)

        return skipped


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers: the outermost list that holds an experts module."""
    path = next(iter(experts_modules(model)))
    parts = path.split(".")
    for end in range(1, len(parts)):
        module = model.get_submodule(".".join(parts[:end]))
        if isinstance(module, nn.ModuleList):
            return module
    raise AssertionError(f"no module list above `{path}`")


def _signature(layer: nn.Module) -> tuple[object, ...]:
    found: list[object] = []
    for name, module in layer.named_modules():
        plain = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, int | float | str | bool | None) and key not in _INDEX_NAMES
        )
        found.append((name, type(module).__name__, plain))
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    found.extend((name, tuple(tensor.shape)) for name, tensor in tensors)
    return tuple(found)
