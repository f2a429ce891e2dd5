"""Which decoder layers of a stock model are alike, so that one of each kind can stand for all.

Two layers are of one kind when their modules agree in class, in parameter shapes and in every
plain attribute but the layer's own index. Used only to make measuring on the meta device fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hotset.models.seam import experts_modules

_INDEX_NAMES = ("layer_idx", "layer_id", "layer_index", "layer_number")


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Path and list of the decoder layers: the outermost list that holds an experts module."""
    path = next(iter(experts_modules(model)))
    parts = path.split(".")
    for end in range(1, len(parts)):
        module = model.get_submodule(".".join(parts[:end]))
        if isinstance(module, nn.ModuleList):
            return ".".join(parts[:end]), module
    raise AssertionError(f"no module list above `{path}`")


def kinds(layers: nn.ModuleList) -> list[int]:
    """For each layer the index of the first layer of its kind."""
    first: dict[object, int] = {}
    return [first.setdefault(_signature(layer), index) for index, layer in enumerate(layers)]


@contextmanager
def only_first_of_each(model: nn.Module) -> Iterator[list[int]]:
    """Within the block the model has one layer of each kind; yields `kinds` of the full list.

    The layers keep their own indices, so a cache has entries only for those that are left.
    """
    path, layers = decoder_layers(model)
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    kind = kinds(layers)
    setattr(parent, name, nn.ModuleList([layers[i] for i in sorted(set(kind))]))
    try:
        yield kind
    finally:
        setattr(parent, name, layers)


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
