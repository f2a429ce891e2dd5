"""Matrices that are written only if whoever loads them would take them.

Knows how a matrix that is read back is judged (`packed`), and nothing of experts or shards.
"""

from __future__ import annotations

from pathlib import Path

import torch

from hotset.checkpoint.finite import is_finite
from hotset.checkpoint.index import CheckpointIndex, TensorEntry
from hotset.checkpoint.packed import (
    LEAST_TYPICAL,
    MOST_SINGLE,
    PackedEntry,
    check_scales,
    fold,
)
from hotset.checkpoint.reader import memory_of
from hotset.checkpoint.rtn import Target, quantise
from hotset.core.errors import CheckpointError


def quantise_checked(
    weight_NK: torch.Tensor, target: Target, name: str, file: Path
) -> dict[str, torch.Tensor]:
    """As `quantise`, with contiguous tensors that whoever loads them takes.

    Args:
        weight_NK: [N, K], any float dtype.
        target: the format.
        name: of the matrix, for messages.
        file: that it was read from, likewise.

    Raises:
        CheckpointError: weights as no training leaves them, which `packed.check_scales` would not
            load in this format, or whose scales overflow.
    """
    tensors = {
        suffix: tensor.contiguous() for suffix, tensor in quantise(weight_NK, target.name).items()
    }
    entries = [
        TensorEntry(
            f"{name}.{suffix}",
            file,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            0,
            tensor.nbytes,
        )
        for suffix, tensor in tensors.items()
    ]
    # Recognised by their names as they will be when they are read.
    (entry,) = fold(CheckpointIndex({entry.name: entry for entry in entries}), None).values()
    assert isinstance(entry, PackedEntry), entry
    cause: CheckpointError | None = None
    if all(is_finite(tensor) for tensor in tensors.values()):
        try:
            check_scales([(entry, {s: memory_of(tensors[s]) for s in entry.parts})])
        except CheckpointError as error:
            cause = error  # its hint is for who reads
        else:
            return tensors
    largest = weight_NK.float().abs().amax(1)
    raise CheckpointError(
        f"`{name}` of `{file}` cannot be written in {target.name}: the largest weights of its rows "
        f"are {largest.median():.3g} (typical) and {largest.max():.3g} (any), expected "
        f"{LEAST_TYPICAL:.3g} to {entry.format.most_typical:.0f} and at most {MOST_SINGLE:.0f}",
        hint="no training leaves such weights: download the checkpoint again, or use it as it is",
    ) from cause
