"""Writes a checkpoint anew with its routed experts quantised and all else as it was.

Streaming: one expert's matrix is in memory at a time. Experts get names of their own
(`...experts.3.gate_proj.weight_packed`) whatever the source does, as compressed-tensors writes
them; those of gpt-oss, whose rows alternate and have biases, keep their tensors of all experts, as
OpenAI publishes them in MXFP4. How a matrix is quantised is `rtn`; how files are written `writer`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from hotset.checkpoint.convert import convert_expert
from hotset.checkpoint.files import read_json
from hotset.checkpoint.index import CheckpointIndex, TensorEntry
from hotset.checkpoint.jobs import sources_of
from hotset.checkpoint.loadable import quantise_checked
from hotset.checkpoint.mapping import ExpertPiece, KeyMap
from hotset.checkpoint.packed import PackedEntry
from hotset.checkpoint.params import ExpertParam
from hotset.checkpoint.reader import ShardReader
from hotset.checkpoint.rtn import Target, quantise
from hotset.checkpoint.writer import Output, Piece, write_shards
from hotset.core.errors import CapacityError, CheckpointError, ConfigError
from hotset.core.units import MIB, format_bytes

# Small files that go along; weights in other formats do not.
_TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
_COPY_BYTES = 16 * MIB
# `quantization_config` of gpt-oss, as published.
MXFP4_CONFIG: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@dataclass(frozen=True)
class Shrunk:
    """What was written.

    Attributes:
        source_bytes, num_bytes: of all tensors, before and after.
        num_matrices: that were quantised.
    """

    source_bytes: int
    num_bytes: int
    num_matrices: int


def shrink(
    folder: Path,
    keys: KeyMap,
    target: Target,
    output: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Shrunk:
    """Quantises the experts of a checkpoint into a new folder.

    The config is written last, so that a folder that was left half-done is none that loads; where
    the process lives to see it, what was written is removed.

    Args:
        folder: the checkpoint.
        keys: its tensors, complete and checked.
        target: the format.
        output: an empty folder, or none yet.
        progress: told (bytes written, bytes to write).

    Raises:
        CheckpointError: its experts or other weights are quantised already, or experts not of a
            form or shape that the target can hold, or so small or large that they would not load.
        ConfigError: the output is not empty, or cannot be made.
        CapacityError: the disk has no room.
    """
    with ShardReader(keep_file_cache=True) as reader:
        index = CheckpointIndex.read(folder)
        experts = list(_expert_pieces(keys, target, reader))
        _require_plain_others(keys)
        pieces = [*(piece for piece, _ in experts), *_other_pieces(index, keys, reader)]
        total = sum(piece.nbytes for piece in pieces)
        _make_room(output, total)
        done = 0

        def report(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(done, total)

        config = quantization_config(target, ignored=_linear_names(keys))
        with _empty_unless_done(output):
            write_shards(output, pieces, progress=report)
            _copy_texts(folder, output, MXFP4_CONFIG if has_fused_layout(keys) else config)
    return Shrunk(index.total_bytes, total, sum(count for _, count in experts))


@contextmanager
def _empty_unless_done(output: Path) -> Iterator[None]:
    """Takes what was written away again where the block breaks off, an interrupt included, so that
    the same command can be given once more."""
    try:
        yield
    except BaseException:
        for file in output.iterdir():
            file.unlink()
        raise


def has_fused_layout(keys: KeyMap) -> bool:
    """Whether experts are gpt-oss's: gate and up alternate, or a bias is added."""
    return any(param.interleaved or _is_bias(param) for param in keys.params)


def _is_bias(param: ExpertParam) -> bool:
    return param.field.endswith("_bias")


def _expert_pieces(
    keys: KeyMap, target: Target, reader: ShardReader
) -> Iterator[tuple[Piece, int]]:
    """What is written of experts, each with the number of matrices in it. Biases are left out: they
    stay as they are."""
    grouped: dict[str, list[ExpertPiece]] = defaultdict(list)
    for piece in keys.pieces:
        if not _is_bias(piece.param):
            grouped[piece.param.full_name].append(piece)
    fused = has_fused_layout(keys)
    for unordered in grouped.values():
        pieces = sorted(unordered, key=lambda piece: piece.part)
        _require_plain(pieces)
        num_experts = pieces[0].param.shape[0]
        if fused:
            yield _fused(pieces, target, reader), num_experts
        elif pieces[0].expert is not None:
            for piece in pieces:
                yield _as_published(piece, target, reader), 1
        else:
            for expert in range(num_experts):
                for made in _taken_apart(pieces, expert, target, reader):
                    yield made, 1


def _require_plain(pieces: list[ExpertPiece]) -> None:
    packed = next((p.entry for p in pieces if isinstance(p.entry, PackedEntry)), None)
    if packed is not None:
        raise CheckpointError(
            f"`{packed.name}` in `{packed.file}` is quantised already",
            hint="quantise the BF16 checkpoint that it was made from",
        )


def _require_plain_others(keys: KeyMap) -> None:
    """Others would be copied as they are, under a config that no longer says how they are packed.
    Those that are not loaded count as well: whoever reads the files looks at all of them."""
    others = [tensor.entry for tensor in keys.core]
    others += [entry for entry, _ in (*keys.ignored, *keys.unexpected)]
    packed = [entry for entry in others if isinstance(entry, PackedEntry)]
    if packed:
        raise CheckpointError(
            f"weights besides the experts ({len(packed)}) are quantised already, such as "
            f"`{packed[0].name}` in `{packed[0].file}` ({packed[0].format.label}); the new config "
            "can say of experts only how they are packed",
            hint="quantise the BF16 checkpoint that it was made from",
        )


def _fused(pieces: list[ExpertPiece], target: Target, reader: ShardReader) -> Piece:
    """All experts of a layer as gpt-oss has them: `_blocks` [E, N, K / 32, 16], `_scales`.

    Codes go to the file expert by expert; scales, a seventeenth of it, wait for the last.
    """
    (piece,) = pieces if len(pieces) == 1 else (None,)
    if piece is None or piece.converter is not None or not piece.param.transposed:
        raise CheckpointError(
            f"`{pieces[0].entry.name}` in `{pieces[0].entry.file}`: experts with interleaved rows "
            "or biases can be quantised from tensors of all experts only, as gpt-oss has them"
        )
    entry, (num_experts, columns, rows) = piece.entry, piece.param.shape
    if target.name != "mxfp4":
        raise ConfigError(
            f"`--format {target.name}`: experts with interleaved rows or biases, such as "
            f"`{entry.name}`, are published in MXFP4 alone",
            hint="use `--format mxfp4`",
        )
    _require_multiple(entry, columns, target, hint="its experts cannot be quantised here")
    groups = columns // target.multiple
    blocks, scales = (num_experts, rows, groups, target.multiple // 2), (num_experts, rows, groups)

    def make() -> Iterator[torch.Tensor]:
        kept = torch.empty(scales, dtype=torch.uint8)
        for expert in range(num_experts):
            weight = _read(reader, piece, expert=expert)[0].T
            made = quantise_checked(weight, target, f"{entry.name}[{expert}]", entry.file)
            kept[expert] = made["weight_scale"]
            yield made["weight_packed"]
        yield kept

    outputs = (
        Output(f"{entry.name}_blocks", "uint8", blocks, prod(blocks)),
        Output(f"{entry.name}_scales", "uint8", scales, prod(scales)),
    )
    return Piece(outputs, make)


def _as_published(piece: ExpertPiece, target: Target, reader: ShardReader) -> Piece:
    """One expert's matrix that has a tensor of its own."""
    entry = piece.entry

    def read() -> torch.Tensor:
        return _read(reader, piece, expert=piece.expert or 0)

    return _quantised(entry.name.removesuffix(".weight"), entry, entry.shape, target, read)


def _taken_apart(
    pieces: list[ExpertPiece], expert: int, target: Target, reader: ShardReader
) -> Iterator[Piece]:
    """The matrices of one expert of a tensor that holds all: gate and up, or the second."""
    first = pieces[0]
    param, entry = first.param, first.entry
    rows, columns = param.shape[:0:-1] if param.transposed else param.shape[1:]
    head, _, last = entry.name.rpartition(".")
    head = head if last == param.name else param.module

    def read() -> torch.Tensor:
        """[out, in], gate rows before up rows."""
        tensors = {piece.part: _read(reader, piece, expert=expert) for piece in pieces}
        if first.converter is None:
            made = tensors[0]
        else:
            patterns = first.converter.source_patterns
            sources = {patterns[part]: tensor for part, tensor in tensors.items()}
            made = convert_expert(first.converter, sources, param)
        return made[0].T if param.transposed else made[0]

    if param.name != "gate_up_proj":
        yield _quantised(f"{head}.{expert}.{param.name}", entry, (rows, columns), target, read)
        return
    half = rows // 2
    for name, begin in (("gate_proj", 0), ("up_proj", half)):

        def read_half(begin: int = begin) -> torch.Tensor:
            return read()[begin : begin + half]

        yield _quantised(f"{head}.{expert}.{name}", entry, (half, columns), target, read_half)


def _quantised(
    name: str,
    entry: TensorEntry,
    shape: tuple[int, ...],
    target: Target,
    read: Callable[[], torch.Tensor],
) -> Piece:
    """The tensors of one quantised matrix; their sizes from a matrix of zeros."""
    _require_multiple(entry, shape[1], target)
    example = quantise(torch.zeros(shape), target.name)
    outputs = tuple(
        Output(
            f"{name}.{suffix}",
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.nbytes,
        )
        for suffix, tensor in example.items()
    )

    def make() -> Iterator[torch.Tensor]:
        yield from quantise_checked(read(), target, name, entry.file).values()

    return Piece(outputs, make)


def _require_multiple(
    entry: TensorEntry, columns: int, target: Target, *, hint: str = "try `--format fp8`"
) -> None:
    if columns % target.multiple:
        raise CheckpointError(
            f"`{entry.name}` in `{entry.file}` has rows of {columns} values, {target.name} needs "
            f"a multiple of {target.multiple}",
            hint=hint,
        )


def _read(reader: ShardReader, piece: ExpertPiece, *, expert: int) -> torch.Tensor:
    """One expert's part of a tensor; of one that holds all experts a slice [1, ...]."""
    (source,) = sources_of(piece, expert)
    tensor = torch.empty(source.shape, dtype=source.dtype)
    reader.read_checked(source.entry, source.offset, tensor)
    return tensor[None] if piece.expert is None else tensor


def _other_pieces(index: CheckpointIndex, keys: KeyMap, reader: ShardReader) -> Iterator[Piece]:
    """All tensors that are no experts' matrices, byte by byte, those included that hotset does not
    load."""
    experts = {piece.entry.name for piece in keys.pieces if not _is_bias(piece.param)}
    for entry in index.values():
        if entry.name not in experts:
            output = Output(entry.name, entry.dtype, entry.shape, entry.nbytes)
            yield Piece((output,), lambda entry=entry: _copied(entry, reader))  # type: ignore[misc]


def _copied(entry: TensorEntry, reader: ShardReader) -> Iterator[torch.Tensor]:
    for begin in range(0, entry.nbytes, _COPY_BYTES):
        part = torch.empty(min(_COPY_BYTES, entry.nbytes - begin), dtype=torch.uint8)
        reader.read_into(entry.file, entry.offset + begin, part)
        yield part


def _make_room(output: Path, num_bytes: int) -> None:
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(
                f"`--output {output}` is there already", hint="give a folder that is new or empty"
            )
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass  # files can be made in it
    except OSError as error:
        raise ConfigError(
            f"`--output {output}` cannot be made: {error.strerror}",
            hint="give a folder that you may write to",
        ) from error
    free = shutil.disk_usage(output).free
    if num_bytes > free:
        raise CapacityError(
            f"the new checkpoint takes {format_bytes(num_bytes)}, `{output}` has "
            f"{format_bytes(free)} free",
            hint="give a folder on a larger disk",
        )


def quantization_config(target: Target, *, ignored: list[str]) -> dict[str, Any]:
    """`quantization_config` as compressed-tensors reads it.

    Args:
        ignored: linear modules that are not quantised.
    """
    group = {
        "format": target.format,
        "targets": ["Linear"],
        "weights": {**target.weights, "symmetric": True, "dynamic": False},
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": target.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _linear_names(keys: KeyMap) -> list[str]:
    """Modules that stay as they are, of those that could be quantised."""
    return sorted(
        tensor.entry.name.removesuffix(".weight")
        for tensor in keys.core
        if tensor.entry.name.endswith(".weight") and len(tensor.entry.shape) == 2
    )


def _copy_texts(folder: Path, output: Path, config: dict[str, Any]) -> None:
    for path in sorted(folder.iterdir()):
        is_text = path.suffix in _TEXT_SUFFIXES and path.is_file()
        is_ours = path.name == "config.json" or path.name.endswith(".safetensors.index.json")
        if is_text and not is_ours:
            shutil.copyfile(path, output / path.name)
    changed = read_json(folder / "config.json") | {"quantization_config": config}
    text = json.dumps(changed, indent=2, ensure_ascii=False)
    (output / "config.json").write_text(text + "\n", encoding="utf-8")
