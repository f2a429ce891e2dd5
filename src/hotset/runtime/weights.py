"""Where an engine's weights come from: a checkpoint, or (in benchmarks) made up in memory.

A source knows the model's numbers before a weight is read, loads what stays resident, and fills
the arena. The engine knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from hotset.checkpoint.loader import load_experts
from hotset.checkpoint.source import resolve_model
from hotset.checkpoint.validate import check_finite_core
from hotset.core.geometry import ModelGeometry
from hotset.experts.store import ExpertStore
from hotset.models.describe import read_keys
from hotset.models.geometry import build_meta, read_config
from hotset.models.load import load_resident
from hotset.models.quantised import geometry_of
from hotset.runtime.text import Text

# (bytes done, bytes in all)
Progress = Callable[[int, int], None]


class WeightSource(Protocol):
    """What `Engine` loads from."""

    @property
    def geometry(self) -> ModelGeometry: ...

    @property
    def text(self) -> Text | None:
        """Tokenizer and template; `None` for a model without one (token ids only)."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    def load_resident(self, device: torch.device) -> PreTrainedModel:
        """The module tree without experts, its weights on `device`."""

    def fill_experts(self, store: ExpertStore, progress: Progress) -> None:
        """Writes every record into the store's arena."""


class CheckpointFiles:
    """A checkpoint in a folder, checked from its headers; it may have no tokenizer.

    Args:
        model: hub id, local folder or `pocket`.
        dtype: compute dtype; `None` takes the checkpoint's.
        revision: of a hub id.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, incomplete or not understood.
    """

    def __init__(self, model: str, *, dtype: str | None = None, revision: str | None = None):
        self.folder: Path = resolve_model(model, revision)
        self.config = read_config(self.folder)
        self.meta = build_meta(self.config, dtype)
        self.keys = read_keys(self.folder, self.meta)
        self._geometry = geometry_of(self.meta, self.keys)

    @property
    def geometry(self) -> ModelGeometry:
        return self._geometry


class CheckpointWeights(CheckpointFiles):
    """A checkpoint that an engine is loaded from: `CheckpointFiles`, and the text side."""

    def __init__(self, model: str, *, dtype: str | None = None, revision: str | None = None):
        super().__init__(model, dtype=dtype, revision=revision)
        self._text = Text(self.folder, self.config)

    @property
    def text(self) -> Text:
        return self._text

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._text.stop_ids

    def load_resident(self, device: torch.device) -> PreTrainedModel:
        model = load_resident(self.config, self.keys, dtype=self.geometry.dtype, device=device)
        check_finite_core(model)
        return model

    def fill_experts(self, store: ExpertStore, progress: Progress) -> None:
        load_experts(self.keys, destination=store.fields, progress=progress)
