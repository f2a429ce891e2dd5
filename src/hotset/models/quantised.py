"""A model's numbers with its weights as a checkpoint holds them, or as its config says.

The meta-device model knows shapes only. Which formats records keep is `checkpoint/record_formats`;
here it becomes a `ModelGeometry`. Reads nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

from hotset.checkpoint.mapping import KeyMap
from hotset.checkpoint.packed import PackedEntry
from hotset.checkpoint.record_formats import record_formats
from hotset.core.formats import PLAIN, WeightFormat
from hotset.core.geometry import ModelGeometry, MoELayer
from hotset.core.record import DTYPE_BYTES
from hotset.core.units import format_bytes
from hotset.models.geometry import MetaModel

logger = logging.getLogger(__name__)


def geometry_of(meta: MetaModel, keys: KeyMap) -> ModelGeometry:
    """A model's numbers with its experts as a checkpoint holds them.

    Args:
        meta: the model.
        keys: the checkpoint, complete for it.
    """
    formats = record_formats(keys)
    names = {(param.layer, param.field): param.full_name for param in meta.params}
    layers = tuple(
        _with_formats(layer, formats[names[index, "up"]], formats[names[index, "down"]])
        for index, layer in enumerate(meta.geometry.layers)
    )
    _say_what_is_dequantised(meta.geometry, layers, keys)
    return replace(
        meta.geometry, layers=layers, dequantised_bytes=_dequantised_bytes(meta.geometry, keys)
    )


def with_weights(geometry: ModelGeometry, weights: WeightFormat) -> ModelGeometry:
    """The same with all experts in one format, as far as a config tells."""
    down = replace(weights, has_order=False)
    layers = tuple(_with_formats(layer, weights, down) for layer in geometry.layers)
    return replace(geometry, layers=layers)


def _with_formats(layer: MoELayer, up: WeightFormat, down: WeightFormat) -> MoELayer:
    return replace(layer, expert=layer.expert.in_format(up, down))


def _dequantised_bytes(geometry: ModelGeometry, keys: KeyMap) -> int:
    """Resident weights that files hold quantised, in the compute dtype that they are kept in."""
    targets = {
        tensor.entry.name: tensor.entry
        for tensor in keys.core
        if isinstance(tensor.entry, PackedEntry)
    }
    elements = sum(_numel(entry.shape) for entry in targets.values())
    return elements * DTYPE_BYTES[geometry.dtype]


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _say_what_is_dequantised(
    geometry: ModelGeometry, layers: tuple[MoELayer, ...], keys: KeyMap
) -> None:
    """Says which experts' weights do not keep their published bits, and what that costs."""
    packed = Counter(
        piece.param.layer for piece in keys.pieces if isinstance(piece.entry, PackedEntry)
    )
    plain = [
        index
        for index in sorted(packed)
        if PLAIN in (layers[index].expert.up_format, layers[index].expert.down_format)
    ]
    if plain:
        num_bytes = sum(layers[i].num_experts * layers[i].expert.record_bytes for i in plain)
        where = ", ".join(str(index) for index in plain[:5]) + (", ..." if len(plain) > 5 else "")
        logger.warning(
            "experts of %d MoE layers (%s) are quantised in several formats side by side: what "
            "differs is kept in %s, their records take %s",
            len(plain),
            where,
            geometry.dtype,
            format_bytes(num_bytes),
        )
