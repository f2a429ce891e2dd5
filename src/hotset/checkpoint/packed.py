"""Quantised matrices as the weights that they stand for.

`fold` puts one entry in the place of codes and companions: it has the name and shape that an
unquantised checkpoint has, so that whoever sorts, checks or loads tensors by name need not know of
formats. `read_packed` reads the pieces of one matrix and checks their values. Knows nothing of
experts or records.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from hotset.checkpoint.formats import SUFFIXES, recognise
from hotset.checkpoint.formats.base import UNNAMED, MatrixFormat, located
from hotset.checkpoint.index import CheckpointIndex, TensorEntry, some
from hotset.checkpoint.quantised import Declared
from hotset.checkpoint.reader import Range, ShardReader, memory_of
from hotset.core.errors import CheckpointError

# Companions that no unquantised module calls its own parameters by.
_ONLY_QUANTISED = {
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_shape"),
    *("weight_global_scale", "weight_zero_point", "weight_g_idx", "qscale_weight"),
    *("qweight", "qzeros"),
}

# All experts in one tensor: `gate_up_proj_blocks` stands for the parameter `gate_up_proj`.
_FUSED = re.compile(r"(.+_proj)_(blocks|scales|scale_inv|activation_scale)")

# Codes that may have the name of a parameter.
_CODE_DTYPES = ("float8_e4m3fn",)

# No single weight that a scale allows is larger.
MOST_SINGLE = 2.0**14
# An E8M0 scale that was converted by value instead of by bits is 2^-127.
LEAST_TYPICAL = 2.0**-100

# Powers of two, which have no sign.
_UNSIGNED = (torch.uint8, torch.float8_e8m0fnu)

# Scales of a matrix that are looked at; the whole of it would take as long as reading it.
_NUM_SAMPLED = 128


# Tensors of one matrix by suffix, as memory that files are read into.
Memories = Mapping[str, memoryview]


@dataclass(frozen=True, slots=True)
class PackedEntry(TensorEntry):
    """A weight that the files hold quantised.

    As a `TensorEntry` it is what it stands for: `dtype` is that of `MatrixFormat.dequantise`, while
    `file` and `offset` are those of its codes and `nbytes` counts all that is read.

    Attributes:
        format: how it is packed.
        parts: its tensors by suffix, those that are not needed left out.
    """

    format: MatrixFormat
    parts: dict[str, TensorEntry]


def fold(index: CheckpointIndex, declared: Declared | None) -> CheckpointIndex:
    """The same checkpoint with one entry for each quantised matrix.

    Args:
        index: as the files have it.
        declared: what the configs say of it.

    Raises:
        CheckpointError: matrices whose tensors are not those of a known format, or not all of them;
            or an unquantised weight with companions of a quantised one.
    """
    groups: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    for entry in index.values():
        stands_for, suffix = _split(entry.name)
        groups[stands_for][suffix] = entry
    entries: list[TensorEntry] = []
    problems: list[CheckpointError] = []
    for stands_for, group in groups.items():
        try:
            entries += _fold_group(stands_for, group, declared)
        except CheckpointError as error:
            problems.append(error)
    if problems:
        count = f" ({len(problems)})" if len(problems) > 1 else ""
        said = some([error.message for error in problems])
        raise CheckpointError(
            f"quantised weights that do not go together{count}: {said}", hint=problems[0].hint
        )
    return CheckpointIndex({entry.name: entry for entry in entries})


def _fold_group(
    stands_for: str, group: dict[str, TensorEntry], declared: Declared | None
) -> list[TensorEntry]:
    """All tensors that could belong to one matrix: as one, or as they are."""
    if "" in group and len(group) > 1 and group[""].dtype in _CODE_DTYPES:
        group = {suffix or UNNAMED: entry for suffix, entry in group.items()}
    companions = {suffix: entry for suffix, entry in group.items() if suffix}
    format_ = recognise(companions, declared) if companions else None
    if format_ is None:
        orphans = sorted(companions.keys() & _ONLY_QUANTISED)
        if orphans:
            raise CheckpointError(
                f"{located(companions[orphans[0]])} is beside no quantised weight",
                hint="is the checkpoint complete, and of one piece?",
            )
        return list(group.values())
    if "" in group:
        raise CheckpointError(
            f"{located(group[''])} is there unquantised, and as {format_.label} too",
            hint="remove the files that do not belong to this checkpoint",
        )
    parts = {s: entry for s, entry in companions.items() if s not in format_.unused}
    return [_packed(stands_for, format_, parts)]


def _split(name: str) -> tuple[str, str]:
    """What a tensor would stand for, and its suffix: empty for one that cannot belong to codes."""
    head, _, last = name.rpartition(".")
    if last in SUFFIXES:
        return f"{head}.weight", last
    fused = _FUSED.fullmatch(last)
    if fused:
        return f"{head}.{fused.group(1)}", fused.group(2)
    return name, ""


def _packed(name: str, format_: MatrixFormat, parts: dict[str, TensorEntry]) -> PackedEntry:
    codes = max(parts.values(), key=lambda entry: entry.nbytes)
    return PackedEntry(
        name,
        codes.file,
        "float32",
        format_.shape,
        codes.offset,
        sum(entry.nbytes for entry in parts.values()),
        format_,
        parts,
    )


def read_packed(
    reader: ShardReader,
    entry: PackedEntry,
    *,
    expert: int | None = None,
    without: str | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of one matrix by suffix, checked.

    Args:
        reader: of the files.
        entry: the matrix.
        expert: of a tensor that holds all experts, the one to read.
        without: a suffix that is read elsewhere.

    Raises:
        CheckpointError: a file cannot be read, holds NaN or Inf, or see `check_scales`.
    """
    tensors = {
        suffix: torch.empty(
            part.shape if expert is None else part.shape[1:], dtype=getattr(torch, part.dtype)
        )
        for suffix, part in entry.parts.items()
        if suffix != without
    }
    memories = {suffix: memory_of(tensor) for suffix, tensor in tensors.items()}
    reader.read_all(ranges_of(entry, memories, expert=expert))
    check_scales([(entry, memories)])
    return tensors


def ranges_of(entry: PackedEntry, memories: Memories, *, expert: int | None) -> list[Range]:
    """Where in the files each of a matrix's tensors is, and which of them hold numbers.

    Args:
        memories: by suffix: what is to be filled.
        expert: of tensors that hold all experts, the one to read.
    """
    ranges = []
    for suffix, memory in memories.items():
        part = entry.parts[suffix]
        offset = part.offset if expert is None else part.offset + expert * len(memory)
        ranges.append(Range(part.file, offset, memory, part, numbers_of(entry, suffix)))
    return ranges


def numbers_of(entry: PackedEntry, suffix: str) -> torch.dtype | None:
    """What a tensor's bytes are where they must not be NaN or Inf."""
    dtype: torch.dtype = getattr(torch, entry.parts[suffix].dtype)
    if suffix == entry.format.scale and dtype == torch.uint8:
        dtype = torch.float8_e8m0fnu
    return dtype if dtype.is_floating_point else None


def dequantise_entry(reader: ShardReader, entry: PackedEntry, dtype: torch.dtype) -> torch.Tensor:
    """The weight that an entry stands for, in its shape, rounded once to `dtype`.

    Raises:
        CheckpointError: as `read_packed`.
    """
    if len(entry.shape) == 2:
        return dequantised(entry, read_packed(reader, entry)).to(dtype)
    made = torch.empty(entry.shape, dtype=dtype)
    for expert in range(entry.shape[0]):
        made[expert] = dequantised(entry, read_packed(reader, entry, expert=expert))
    return made


@contextmanager
def naming(entry: PackedEntry) -> Iterator[None]:
    """Says of an error within where the values are from: a format sees values alone."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"`{entry.name}` in `{entry.file}`: {error.message}", hint=error.hint
        ) from error


def dequantised(entry: PackedEntry, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The matrix of these tensors in FP32, its sides as in the shape of what it stands for: all of
    an entry, or one expert of a tensor of all experts."""
    with naming(entry):
        matrix = entry.format.dequantise(tensors)
    return matrix.T if entry.format.is_transposed else matrix


def check_scales(matrices: Sequence[tuple[PackedEntry, Memories]]) -> None:
    """Requires scales such as weights have.

    Args:
        matrices: of one format and shape, each with the memory of its tensors by suffix.

    Raises:
        CheckpointError: a magnitude that no weight has (scales that were inverted, or converted by
            value); names tensor, file and magnitude of the first of them.
    """
    first, memories = matrices[0]
    name = first.format.scale
    scales = _sampled([memory[name] for _, memory in matrices], first.parts[name].dtype)
    singles = {
        suffix: torch.cat([torch.frombuffer(m[suffix], dtype=torch.float32) for _, m in matrices])[
            :, None
        ]
        for suffix in memories
        if suffix != name and is_single(first.parts[suffix])
    }
    typical, most = first.format.largest({**singles, name: scales}).numpy().T
    limit = first.format.most_typical
    is_large = ~((typical <= limit) & (most <= MOST_SINGLE))
    is_small = (typical > 0) & (typical < LEAST_TYPICAL)
    is_wrong = is_large | is_small
    if not is_wrong.any():
        return
    index = int(is_wrong.argmax())
    part = matrices[index][0].parts[name]
    if is_large[index]:
        raise CheckpointError(
            f"by `{part.name}` in `{part.file}` weights are as large as {typical[index]:.3g} "
            f"(typical) and {most[index]:.3g} (any), expected at most {limit:.0f} and "
            f"{MOST_SINGLE:.0f}",
            hint="its scales look inverted; was the checkpoint written for another program?",
        )
    raise CheckpointError(
        f"by `{part.name}` in `{part.file}` weights are as small as {typical[index]:.3g}, which is "
        "no number that training leaves",
        hint="its scales look converted by value instead of by bits; download it again",
    )


def is_single(part: TensorEntry) -> bool:
    """Whether a tensor is one number for a whole matrix."""
    return part.dtype == "float32" and part.nbytes == torch.float32.itemsize


def _sampled(scales: Sequence[memoryview], dtype: str) -> torch.Tensor:
    """The median and the largest of some scales of each of N matrices by magnitude, [N, 2]: the
    same as of their bits."""
    of: torch.dtype = getattr(torch, dtype)
    unsigned = (np.uint8, np.uint16, np.uint32)[of.itemsize.bit_length() - 1]
    # An odd step, so that a sample does not keep to the same columns.
    step = max(1, len(scales[0]) // of.itemsize // _NUM_SAMPLED) | 1
    first = np.frombuffer(scales[0], unsigned)[::step]
    bits = np.empty((len(scales), len(first)), unsigned)
    for row, memory in zip(bits, scales, strict=True):
        row[:] = np.frombuffer(memory, unsigned)[::step]
    if of not in _UNSIGNED:
        bits &= unsigned((1 << (8 * of.itemsize - 1)) - 1)
    middle = (bits.shape[1] - 1) // 2
    bits.partition((middle, bits.shape[1] - 1), axis=1)
    return torch.from_numpy(bits[:, (middle, -1)]).view(of)
