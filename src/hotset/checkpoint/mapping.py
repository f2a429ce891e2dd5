"""What every tensor of a checkpoint is for: an expert, a resident weight, or nothing.

Uses the library's own conversion mapping (renamings, then at most one converter per key), so no
architecture is named here. Knows names only; `validate` compares shapes and dtypes and says what
is wrong, `loader` moves bytes.

`rename_source_key` and `get_model_conversion_mapping` are internals of transformers: one minor
line is supported, and a test per checkpoint layout holds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from hotset.checkpoint.index import CheckpointIndex, TensorEntry
from hotset.checkpoint.params import ExpertParam

# Tower of another modality, by the words that name it, as a whole component or its beginning.
_TOWER = re.compile(
    r"(^|\.)(vision|visual|image|video|audio|speech|mm_|multi_?modal|patch_merger)[^.]*(\.|$)"
)


# Parts that a layer for multi-token prediction has and a decoder layer has not.
_PREDICTION = re.compile(r"\.(eh_proj|e_proj|h_proj|enorm|hnorm|embed_tokens|shared_head)\.")

_ONE_EXPERT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")

# What makes the library's parameters of them, by its own operations.
_TAKEN_APART = (
    WeightConverter(
        ["experts.*.gate_proj.weight", "experts.*.up_proj.weight"],
        "gate_up_proj",
        operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
    ),
    WeightConverter(
        ["experts.*.down_proj.weight"], "down_proj", operations=[MergeModulelist(dim=0)]
    ),
    WeightConverter(["experts.*.up_proj.weight"], "up_proj", operations=[MergeModulelist(dim=0)]),
)

TOWER_REASON = "a vision or audio tower, not loaded for text"
BUFFER_REASON = "a buffer that the model computes by itself"
SCALE_REASON = "scales of a quantised cache or of activations, which stay in 16 bits here"

_SCALE_OF_ACTIVATIONS = re.compile(r"\.(([kvq]|prob|attn|input|output)_scale|kv_scale)$")


@dataclass(frozen=True, slots=True)
class ExpertPiece:
    """A checkpoint tensor that holds (a part of) a fused expert parameter.

    Attributes:
        entry: the tensor.
        param: the parameter; of a foreign piece as it would be, made of linear layers.
        part: index into the converter's sources, e.g. gate 0, up 1; 0 without a converter.
        expert: id, or `None` when the tensor holds all experts of the layer.
        converter: what the library does with it, `None` when it is only renamed.
        foreign: the library knows no such tensor: others take the experts of this layer apart when
            they quantise them.
    """

    entry: TensorEntry
    param: ExpertParam
    part: int
    expert: int | None
    converter: WeightConverter | None
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class CoreTensor:
    """A checkpoint tensor that the library loads into the module tree.

    Attributes:
        entry: the tensor.
        target: name in the model's state dict; the first one when a converter makes several.
        source: the source pattern that matched, `None` when it is only renamed.
        converter: the converter that consumes it, likewise.
    """

    entry: TensorEntry
    target: str
    source: str | None
    converter: WeightConverter | None

    @property
    def targets(self) -> tuple[str, ...]:
        """All state dict names that it contributes to."""
        if self.converter is None:
            return (self.target,)
        first, *_ = patterns = self.converter.target_patterns
        return tuple(self.target.replace(first, pattern) for pattern in patterns)


@dataclass(frozen=True)
class KeyMap:
    """Every tensor of a checkpoint, in exactly one of four lists.

    Attributes:
        params: the expert parameters that were looked for.
        pieces: tensors of experts.
        core: tensors of the module tree.
        ignored: tensors that are rightly left alone, each with the reason.
        unexpected: tensors that nothing asks for, with the name that the model would know them by.
        beyond: layers of the unexpected tensors that are beyond the model's depth.
    """

    params: tuple[ExpertParam, ...]
    pieces: tuple[ExpertPiece, ...]
    core: tuple[CoreTensor, ...]
    ignored: tuple[tuple[TensorEntry, str], ...]
    unexpected: tuple[tuple[TensorEntry, str], ...]
    beyond: tuple[int, ...] = ()

    @classmethod
    def build(
        cls,
        index: CheckpointIndex,
        *,
        model: PreTrainedModel,
        params: Sequence[ExpertParam],
        towers: Sequence[str] = (),
    ) -> KeyMap:
        """Classifies every tensor of a checkpoint.

        Args:
            index: the checkpoint.
            model: the meta-device model with the expert parameters removed.
            params: what was removed.
            towers: module paths of vision and audio towers that were removed as well.
        """
        classifier = _Classifier(model, params, towers)
        pieces: list[ExpertPiece] = []
        core: list[CoreTensor] = []
        ignored: list[tuple[TensorEntry, str]] = []
        rest: list[tuple[TensorEntry, str]] = []
        # The library's own order: some of its renamings are switched on by an earlier key.
        for name in sorted(index, key=dot_natural_key):
            entry = index[name]
            found, target = classifier.classify(entry)
            if isinstance(found, ExpertPiece):
                pieces.append(found)
            elif isinstance(found, CoreTensor):
                core.append(found)
            else:
                rest.append((entry, target))
        prediction = classifier.layers_beyond(
            target for _, target in rest if _PREDICTION.search(target)
        )
        unexpected: list[tuple[TensorEntry, str]] = []
        for entry, target in rest:
            reason = classifier.ignore_reason(target, prediction)
            if reason is None:
                unexpected.append((entry, target))
            else:
                ignored.append((entry, reason))
        beyond = classifier.layers_beyond(target for _, target in unexpected)
        return cls(
            tuple(params),
            tuple(pieces),
            tuple(core),
            tuple(ignored),
            tuple(unexpected),
            tuple(sorted(beyond)),
        )

    @property
    def folder(self) -> Path | None:
        """Where the checkpoint lies; `None` if nothing of it is the model's."""
        entries = [tensor.entry for tensor in self.core] + [piece.entry for piece in self.pieces]
        return entries[0].file.parent if entries else None

    @property
    def expert_bytes(self) -> int:
        """Bytes of expert tensors in the files."""
        return sum(piece.entry.nbytes for piece in self.pieces)

    @property
    def core_bytes(self) -> int:
        """Bytes of resident tensors in the files."""
        return sum(tensor.entry.nbytes for tensor in self.core)


class _Classifier:
    """The library's renaming, asked key by key."""

    def __init__(
        self, model: PreTrainedModel, params: Sequence[ExpertParam], towers: Sequence[str]
    ) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [t for t in mapping if isinstance(t, WeightRenaming)]
        self._converters = [t for t in mapping if isinstance(t, WeightConverter)]
        self._by_source = {p: c for c in self._converters for p in c.source_patterns}
        self._prefix = model.base_model_prefix
        self._params = {param.full_name: param for param in params}
        self._core = set(model.state_dict())
        # `rename_source_key` asks whether a name is in the stock model; any value but None does.
        self._known = dict.fromkeys(self._core | self._params.keys(), True)
        self._towers = tuple(f"{tower}." for tower in towers)
        self._layer_lists = _decoder_lists(model, params)
        ignores: set[Any] = set(model._keys_to_ignore_on_load_unexpected or ())
        self._library_ignores = [re.compile(pattern) for pattern in ignores]
        self._saved_buffers = _saved_buffers(model)

    def classify(self, entry: TensorEntry) -> tuple[ExpertPiece | CoreTensor | None, str]:
        """What a tensor is (`None`: nothing that the model has) and its name in the model."""
        target, source = self._rename(entry.name)
        if target in self._core:
            converter = None if source is None else self._by_source[source]
            return CoreTensor(entry, target, source, converter), target
        return self._piece(entry, target, source) or self._taken_apart(entry, target), target

    def _rename(self, key: str) -> tuple[str, str | None]:
        target, source = rename_source_key(
            key, self._renamings, self._converters, self._prefix, self._known
        )
        if target not in self._known and key in self._known:
            # As the library: a name that the model knows as it stands is not renamed.
            return rename_source_key(key, [], [], self._prefix, self._known)
        return target, source

    def _piece(self, entry: TensorEntry, target: str, source: str | None) -> ExpertPiece | None:
        param = self._params.get(target)
        if param is None:
            return None
        if source is None:
            return ExpertPiece(entry, param, 0, None, None)
        converter = self._by_source[source]
        part = converter.source_patterns.index(source)
        if "*." not in source:
            return ExpertPiece(entry, param, part, None, converter)
        # The library's pattern takes anything in the place of the expert id; it must be a number.
        renamed = apply_renamings(entry.name, self._renamings)
        match = re.search(source.replace("*.", r"(\d+)\."), renamed)
        if match is None:
            return None
        return ExpertPiece(entry, param, part, int(match.group(1)), converter)

    def _taken_apart(self, entry: TensorEntry, target: str) -> ExpertPiece | None:
        """A piece of an expert of which the library knows only the tensor of all experts.

        Tools that quantise linear layers make one of each expert's projections, and publish them
        under these names.
        """
        for name in self._names(target):
            match = _ONE_EXPERT.fullmatch(name)
            if match is None:
                continue
            module, expert, projection = match.groups()
            for converter in _TAKEN_APART:
                source = f"experts.*.{projection}.weight"
                param = self._params.get(f"{module}.{converter.target_patterns[0]}")
                if param and source in converter.source_patterns:
                    part, made = converter.source_patterns.index(source), param.as_linear()
                    return ExpertPiece(entry, made, part, int(expert), converter, foreign=True)
        return None

    def layers_beyond(self, targets: Iterable[str]) -> set[int]:
        """The layers of these tensors that are beyond the model's depth."""
        return {layer for layer in map(self._beyond, targets) if layer is not None}

    def ignore_reason(self, target: str, prediction: set[int]) -> str | None:
        """Why a tensor that the model does not have may be left alone, if it may."""
        in_tower = any(name.startswith(self._towers) for name in self._names(target))
        if in_tower or _TOWER.search(target):
            return TOWER_REASON
        if self._beyond(target) in prediction:
            return "in a layer for multi-token prediction beyond the model's own"
        if _SCALE_OF_ACTIVATIONS.search(target):
            return SCALE_REASON
        if any(pattern.search(target) for pattern in self._library_ignores):
            return "transformers ignores it for this model class"
        if any(pattern.search(target) for pattern in self._saved_buffers):
            return BUFFER_REASON
        return None

    def _beyond(self, target: str) -> int | None:
        """The layer that a tensor belongs to, where the model has fewer."""
        for layers, length in self._layer_lists:
            for name in self._names(target):
                match = layers.match(name)
                if match and int(match.group(1)) >= length:
                    return int(match.group(1))
        return None

    def _names(self, target: str) -> tuple[str, str, str]:
        """A name as it is, with the base model's prefix, and without it."""
        prefix = f"{self._prefix}."
        return target, prefix + target, target.removeprefix(prefix)


def _decoder_lists(
    model: nn.Module, params: Sequence[ExpertParam]
) -> list[tuple[re.Pattern[str], int]]:
    """The module lists that the MoE layers are members of: names in them, and their lengths."""
    paths = {match.group(1) for p in params if (match := re.match(r"(.+?)\.\d+\.", p.module))}
    return [
        (
            re.compile(re.escape(path) + r"\.(\d+)\."),
            len(list(model.get_submodule(path).children())),
        )
        for path in sorted(paths)
    ]


def _saved_buffers(model: PreTrainedModel) -> list[re.Pattern[str]]:
    """Patterns of buffers that were once saved, which the library leaves alone by hand."""
    patterns = set()
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return [re.compile(pattern) for pattern in patterns]
