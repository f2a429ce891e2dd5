"""A model by name: its numbers, and whether the files of a folder hold what they promise.

Reads configs and shard headers, never a weight.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hotset.checkpoint.formats import declared_weights
from hotset.checkpoint.hub import require_safetensors
from hotset.checkpoint.index import CheckpointIndex
from hotset.checkpoint.mapping import BUFFER_REASON, TOWER_REASON, KeyMap
from hotset.checkpoint.packed import fold
from hotset.checkpoint.quantised import declared_quantisation
from hotset.checkpoint.source import local_folder, resolve_config_only
from hotset.checkpoint.validate import check_complete
from hotset.core.geometry import ModelGeometry
from hotset.models.geometry import MetaModel, build_meta, read_config
from hotset.models.quantised import geometry_of, with_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Description:
    """What is known of a model before a weight is read.

    Attributes:
        geometry: the numbers.
        weights_checked: the headers of all shards were read and hold exactly what the model needs;
            `False` where there is only a config.
    """

    geometry: ModelGeometry
    weights_checked: bool


def describe(model: str, dtype: str | None = None, revision: str | None = None) -> Description:
    """Describes a model by name, without reading a weight.

    Args:
        model: hub id, local folder or `pocket`; of a hub id only its config is fetched.
        dtype: compute dtype; default the checkpoint's own.
        revision: of a hub id.

    Raises:
        CheckpointError: no such model, its config is not understood, or a local folder's files are
            damaged, incomplete or of another model.
    """
    folder = resolve_config_only(model, revision)
    meta = build_meta(read_config(folder), dtype)
    has_weights = local_folder(model) is not None and _has_weights(folder)
    if has_weights:
        keys = read_keys(folder, meta)
        return Description(geometry_of(meta, keys), weights_checked=True)
    weights = declared_weights(declared_quantisation(folder))
    return Description(with_weights(meta.geometry, weights), weights_checked=False)


def read_keys(folder: Path, meta: MetaModel) -> KeyMap:
    """Classifies all tensors of a folder for a model, from the headers.

    Raises:
        CheckpointError: files are missing or damaged, or hold not exactly what the model needs.
    """
    index = fold(CheckpointIndex.read(folder), declared_quantisation(folder))
    keys = KeyMap.build(index, model=meta.model, params=meta.params, towers=meta.towers)
    check_complete(keys, model=meta.model)
    left = Counter(reason for _, reason in keys.ignored)
    for expected in (TOWER_REASON, BUFFER_REASON):
        left.pop(expected, None)
    if left:
        reasons = "; ".join(f"{count} {reason}" for reason, count in left.items())
        logger.warning("%d tensors of `%s` are not loaded: %s", left.total(), folder, reasons)
    return keys


def _has_weights(folder: Path) -> bool:
    """Whether there are shards; weights in a format that cannot be loaded are refused."""
    names = [path.name for path in folder.iterdir()]
    if any(name.endswith((".safetensors", ".gguf", ".bin", ".pt", ".pth")) for name in names):
        require_safetensors(str(folder), names)
        return True
    return False
