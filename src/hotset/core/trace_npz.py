"""Reads traces kept as numpy archives, in the two layouts that are about.

1. One array `experts[token, layer, k]`, and beside the archive a JSON file of the same stem with
   `model`, `experts` and `sequences`, each with `start` and `tokens` (and `dataset`).
2. One array `[text, token, layer, k]` per domain, named after it. The number of experts is not in
   the file; unless it is given, the highest id seen, plus one, is taken.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.core.errors import CheckpointError
from hotset.core.fingerprint import ModelFingerprint
from hotset.core.trace import Trace, TraceInfo, TraceSequence, check_trace, id_dtype

MAGIC = b"PK"
FLAT_NAME = "experts"


def read_npz(path: Path, *, num_experts: int | None = None) -> Trace:
    """Reads either layout.

    Raises:
        CheckpointError: the archive or the JSON beside it is missing, damaged or contradictory.
    """
    arrays = _load_arrays(path)
    if not arrays:
        raise CheckpointError(f"`{path}` holds no array")
    for name, array in arrays.items():
        if array.dtype.kind not in "iu":
            raise CheckpointError(f"`{path}`: array `{name}` is {array.dtype}, not integer ids")
        if array.size == 0 or array.min() < 0:
            raise CheckpointError(f"`{path}`: array `{name}` is empty or has negative ids")
    if set(arrays) == {FLAT_NAME} and arrays[FLAT_NAME].ndim == 3:
        return _read_flat(path, arrays[FLAT_NAME])
    return _read_domains(path, arrays, num_experts)


def _load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"`{path}` is damaged: {error}") from error


def _read_flat(path: Path, ids_TLK: NDArray[Any]) -> Trace:
    described_by = path.with_suffix(".json")
    if not described_by.is_file():
        raise CheckpointError(
            f"`{path}` has no `{described_by.name}` beside it, which says where sequences begin"
        )
    try:
        described = json.loads(described_by.read_text(encoding="utf-8"))
        experts = int(described["experts"])
        sequences = tuple(
            TraceSequence(
                index, int(entry["start"]), int(entry["tokens"]), entry.get("dataset", "")
            )
            for index, entry in enumerate(described["sequences"])
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"`{described_by}` is damaged: {error!r}") from error
    info = TraceInfo(
        _fingerprint(experts, ids_TLK.shape[1], ids_TLK.shape[2]),
        model=str(described.get("model", path.stem)),
        source=str(described.get("source", "")),
        license=str(described.get("license", "")),
    )
    return check_trace(Trace(info, _narrow(ids_TLK, experts), sequences), where=str(path))


def _read_domains(path: Path, arrays: dict[str, NDArray[Any]], num_experts: int | None) -> Trace:
    shapes = {array.shape[2:] for array in arrays.values()}
    if any(array.ndim != 4 for array in arrays.values()) or len(shapes) != 1:
        found = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise CheckpointError(
            f"`{path}` is no known trace layout: {found}",
            hint="expected `experts[token, layer, k]`, or arrays [text, token, layer, k] that "
            "agree in layers and k",
        )
    num_layers, top_k = shapes.pop()
    experts = num_experts or max(int(array.max()) for array in arrays.values()) + 1
    sequences: list[TraceSequence] = []
    parts, start = [], 0
    for domain, array in arrays.items():
        for text in array:
            sequences.append(TraceSequence(len(sequences), start, len(text), domain))
            start += len(text)
        parts.append(array.reshape(-1, num_layers, top_k))
    info = TraceInfo(
        _fingerprint(experts, num_layers, top_k), model=path.stem, inferred=num_experts is None
    )
    trace = Trace(info, _narrow(np.concatenate(parts), experts), tuple(sequences))
    return check_trace(trace, where=str(path))


def _fingerprint(experts: int, num_layers: int, top_k: int) -> ModelFingerprint:
    return ModelFingerprint(
        architecture="", num_experts=(experts,) * num_layers, top_k=(top_k,) * num_layers
    )


def _narrow(ids: NDArray[Any], experts: int) -> NDArray[np.unsignedinteger]:
    """Ids in the trace's own type; ids too large for it stay as they are, for the check to name."""
    dtype = id_dtype(max(experts, int(ids.max()) + 1))
    return np.ascontiguousarray(ids, dtype=dtype)
