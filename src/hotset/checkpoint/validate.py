"""Whether a checkpoint is exactly what a model needs: nothing missing, nothing over, right shapes.

Works on names, shapes and dtypes of a `KeyMap`, before a tensor is read: converters run on the
meta device. All that is wrong is collected and said in one error that names tensors and files.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from hotset.checkpoint.convert import convert_expert, run
from hotset.checkpoint.finite import is_finite
from hotset.checkpoint.index import TensorEntry, some
from hotset.checkpoint.mapping import CoreTensor, ExpertPiece, KeyMap
from hotset.checkpoint.params import ExpertParam
from hotset.core.errors import CheckpointError

FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")


def check_complete(key_map: KeyMap, *, model: PreTrainedModel) -> None:
    """Requires that the checkpoint fills every expert and every resident weight exactly once.

    Args:
        key_map: the checkpoint, classified for this model.
        model: the meta-device model without its expert parameters.

    Raises:
        CheckpointError: names up to five tensors of each kind of problem, with their files.
    """
    pieces = _by_param(key_map)
    foreign = [*_wrong_dtypes(key_map, model)]
    if foreign:
        raise CheckpointError(
            f"weights in a dtype that hotset does not read ({len(foreign)}): {some(foreign)}",
            hint="codes without scales are no weights; see the guide on formats for what it reads",
        )
    for piece in key_map.pieces:
        if piece.converter is not None and len(piece.converter.target_patterns) > 1:
            raise CheckpointError(
                f"{_located(piece.entry)} belongs to experts that the library deals out to "
                f"{len(piece.converter.target_patterns)} modules, which is not supported"
            )
    found = {
        "missing expert tensors": [*_missing_experts(key_map.params, pieces)],
        "missing tensors": [*_missing_core(key_map, model)],
        "unexpected tensors": [*_unexpected(key_map)],
        "weights given twice": [*_duplicates(key_map)],
        "tensors of wrong shape": [*_expert_shapes(pieces), *_core_shapes(key_map, model)],
    }
    problems = [f"{kind} ({len(names)}): {some(names)}" for kind, names in found.items() if names]
    if problems:
        where = f" in `{key_map.folder}`" if key_map.folder else ""
        hint = "is it complete, and does `config.json` belong to it?"
        if key_map.beyond:
            layers = ", ".join(str(layer) for layer in key_map.beyond)
            hint = f"by `config.json` there is no layer {layers}; is `num_hidden_layers` right?"
        raise CheckpointError(
            f"the checkpoint{where} does not fit `{type(model).__name__}`: {'; '.join(problems)}",
            hint=hint,
        )


def check_materialised(model: nn.Module) -> None:
    """Requires that no parameter or buffer, non-persistent ones included, is still a placeholder.

    Raises:
        CheckpointError: names them.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    left = [f"`{name}`" for name, tensor in tensors if tensor.is_meta]
    if left:
        raise CheckpointError(f"tensors that were not loaded ({len(left)}): {some(left)}")


def check_finite_core(model: nn.Module) -> None:
    """Requires that no parameter of the module tree holds NaN or Inf.

    Raises:
        CheckpointError: names the parameters.
    """
    bad = [f"`{name}`" for name, param in model.named_parameters() if not is_finite(param)]
    if bad:
        raise CheckpointError(
            f"resident weights with NaN or Inf ({len(bad)}): {some(bad)}",
            hint="the checkpoint is damaged, or its values do not fit the dtype",
        )


def _by_param(key_map: KeyMap) -> dict[str, list[ExpertPiece]]:
    """Pieces by the full name of the parameter that they belong to."""
    pieces: dict[str, list[ExpertPiece]] = defaultdict(list)
    for piece in key_map.pieces:
        pieces[piece.param.full_name].append(piece)
    return pieces


def _located(entry: TensorEntry) -> str:
    return f"`{entry.name}` in `{entry.file}`"


def _shaped(entries: Iterable[TensorEntry]) -> str:
    return " and ".join(f"{_located(entry)} {list(entry.shape)}" for entry in entries)


def _wrong_dtypes(key_map: KeyMap, model: nn.Module) -> Iterator[str]:
    """Tensors that are not floats where the model has floats, or the other way round."""
    state = model.state_dict()
    for piece in key_map.pieces:
        if piece.entry.dtype not in FLOAT_DTYPES:
            yield f"{_located(piece.entry)} ({piece.entry.dtype})"
    for tensor in key_map.core:
        wants_float = state[tensor.target].is_floating_point()
        if wants_float != (tensor.entry.dtype in FLOAT_DTYPES):
            yield f"{_located(tensor.entry)} ({tensor.entry.dtype})"


def _missing_experts(
    params: Iterable[ExpertParam], pieces: dict[str, list[ExpertPiece]]
) -> Iterator[str]:
    for param in params:
        have = pieces.get(param.full_name, [])
        if not have:
            yield f"`{param.full_name}` of all {param.shape[0]} experts"
            continue
        converter = have[0].converter
        sources = converter.source_patterns if converter else [param.name]
        experts = [None] if have[0].expert is None else range(param.shape[0])
        filled = {(piece.expert, piece.part) for piece in have}
        for expert in experts:
            for part, source in enumerate(sources):
                if (expert, part) not in filled:
                    yield _expected_name(have, expert, part, source)


def _expected_name(have: list[ExpertPiece], expert: int | None, part: int, source: str) -> str:
    """The key of a missing piece, from that of another expert, or else from the pattern."""
    for piece in have:
        if piece.part == part and piece.expert is not None:
            head, _, tail = piece.entry.name.rpartition(f".{piece.expert}.")
            return f"`{head}.{expert}.{tail}`"
    whose = "" if expert is None else f" of expert {expert}"
    return f"`{source}`{whose} in `{have[0].param.module}`"


def _missing_core(key_map: KeyMap, model: PreTrainedModel) -> Iterator[str]:
    made = {target for tensor in key_map.core for target in tensor.targets}
    # Tying is symmetric: whichever of the two is in the files fills the other.
    tied: dict[str, set[str]] = defaultdict(set)
    for target, source in model.all_tied_weights_keys.items():
        tied[source] |= {target, source}
    for group in tied.values():
        if group & made:
            made |= group
    optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    for name in model.state_dict():
        if name not in made and not any(pattern.search(name) for pattern in optional):
            yield f"`{name}`"


def _unexpected(key_map: KeyMap) -> Iterator[str]:
    for entry, _ in key_map.unexpected:
        yield _located(entry)
    for piece in key_map.pieces:
        num_experts = piece.param.shape[0]
        if piece.expert is not None and piece.expert >= num_experts:
            yield f"{_located(piece.entry)} (the model has {num_experts} experts)"


def _duplicates(key_map: KeyMap) -> Iterator[str]:
    """Two tensors for one weight, or one weight both fused and expert by expert."""
    seen: dict[tuple[object, ...], TensorEntry] = {}
    fused = {p.param.full_name: p for p in key_map.pieces if p.expert is None}
    for piece in key_map.pieces:
        key = (piece.param.full_name, piece.part, piece.expert)
        first = seen.setdefault(key, piece.entry)
        whole = fused.get(piece.param.full_name, piece)
        if first is not piece.entry or (piece.expert is not None and whole is not piece):
            other = first if first is not piece.entry else whole.entry
            yield f"{_located(other)} and {_located(piece.entry)}"
    for tensor in key_map.core:
        first = seen.setdefault((tensor.target,), tensor.entry)
        if tensor.converter is None and first is not tensor.entry:
            yield f"{_located(first)} and {_located(tensor.entry)}"


def _expert_shapes(pieces: dict[str, list[ExpertPiece]]) -> Iterator[str]:
    """Converts one expert of each kind on the meta device; equal shapes are tried once."""
    tried: dict[tuple[object, ...], bool] = {}
    for have in pieces.values():
        experts: dict[int | None, list[ExpertPiece]] = defaultdict(list)
        for piece in have:
            experts[piece.expert].append(piece)
        for expert, parts in experts.items():
            shapes = tuple((piece.part, piece.entry.shape) for piece in parts)
            param, converter = parts[0].param, parts[0].converter
            if converter is not None and len(parts) < len(converter.source_patterns):
                continue  # said as missing
            key = (param.shape, id(converter), expert is None, shapes)
            if key not in tried:
                tried[key] = _expert_fits(parts)
            if not tried[key]:
                given = _shaped(piece.entry for piece in parts)
                yield f"{given} for `{param.full_name}` {list(param.shape)}"


def _expert_fits(parts: list[ExpertPiece]) -> bool:
    """Whether one expert's tensors convert to one expert of the parameter."""
    param, converter = parts[0].param, parts[0].converter
    shapes = {piece.part: piece.entry.shape for piece in parts}
    if parts[0].expert is None:
        if any(shape[:1] != param.shape[:1] for shape in shapes.values()):
            return False
        shapes = {part: (1, *shape[1:]) for part, shape in shapes.items()}
    if converter is None:
        return shapes[0] == (1, *param.shape[1:])
    sources = {
        converter.source_patterns[part]: torch.empty(shape, device="meta")
        for part, shape in sorted(shapes.items())
    }
    try:
        made = convert_expert(converter, sources, param)
    except (RuntimeError, ValueError, IndexError):
        return False
    return tuple(made.shape) == (1, *param.shape[1:])


def _core_shapes(key_map: KeyMap, model: PreTrainedModel) -> Iterator[str]:
    state = model.state_dict()
    sources: dict[str, list[CoreTensor]] = defaultdict(list)
    for tensor in key_map.core:
        sources[tensor.target].append(tensor)
    for target, tensors in sources.items():
        if not _core_fits(target, tensors, model, state):
            given = _shaped(tensor.entry for tensor in tensors)
            yield f"{given} for `{target}` {list(state[target].shape)}"


def _core_fits(
    target: str, tensors: list[CoreTensor], model: PreTrainedModel, state: dict[str, torch.Tensor]
) -> bool:
    """Whether these tensors make resident weights of the right shapes."""
    converter = tensors[0].converter
    if converter is None:
        return all(tensor.entry.shape == state[target].shape for tensor in tensors)
    sources: dict[str, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        assert tensor.source is not None
        sources[tensor.source].append(torch.empty(tensor.entry.shape, device="meta"))
    try:
        made = run(converter, dict(sources), model, target)
    except (RuntimeError, ValueError, IndexError, AttributeError):
        return False
    first = converter.target_patterns[0]
    shapes = {target.replace(first, pattern): value.shape for pattern, value in made.items()}
    return all(name in state and state[name].shape == shape for name, shape in shapes.items())
