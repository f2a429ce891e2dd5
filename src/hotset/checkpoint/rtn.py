"""Round-to-nearest quantisation of one matrix, in compressed-tensors' layouts.

Scales come from the largest magnitude of each group and every value goes to the nearest code. No
data is looked at: quantisation that is calibrated on data loses less. Plain torch, one matrix at a
time; knows nothing of experts, and of files only how a matrix that is read back is judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotset.checkpoint.finite import is_finite
from hotset.checkpoint.formats.bits import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    bytes_of_nibbles,
    e8m0,
    words_of_nibbles,
)
from hotset.checkpoint.index import CheckpointIndex, TensorEntry
from hotset.checkpoint.packed import (
    LEAST_TYPICAL,
    MOST_SINGLE,
    PackedEntry,
    check_scales,
    fold,
)
from hotset.checkpoint.reader import memory_of
from hotset.core.errors import CheckpointError

# Values along K that share a scale.
INT4_GROUP = 32
NVFP4_GROUP = 16
MXFP4_GROUP = 32
FP8_BLOCK = 128


@dataclass(frozen=True)
class Target:
    """A format to quantise to.

    Attributes:
        name: as the command line calls it.
        format: as compressed-tensors calls it.
        weights: its `weights` arguments in `quantization_config`.
        multiple: K must be a multiple of it.
    """

    name: str
    format: str
    weights: dict[str, Any]
    multiple: int


TARGETS = {
    target.name: target
    for target in (
        Target(
            "int4",
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": INT4_GROUP},
            INT4_GROUP,
        ),
        Target(
            "fp8",
            "float-quantized",
            {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "block_structure": [FP8_BLOCK, FP8_BLOCK],
            },
            1,
        ),
        Target(
            "nvfp4",
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NVFP4_GROUP},
            NVFP4_GROUP,
        ),
        Target(
            "mxfp4",
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": MXFP4_GROUP},
            MXFP4_GROUP,
        ),
    )
}

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


def quantise(weight_NK: torch.Tensor, target: str) -> dict[str, torch.Tensor]:
    """A matrix in one of `TARGETS`: suffix -> tensor, `weight_packed`, `weight_scale`, ...

    Args:
        weight_NK: [N, K], any float dtype, K a multiple of `Target.multiple`.
        target: name of the format.
    """
    made = {"int4": _int4, "fp8": _fp8, "nvfp4": _nvfp4, "mxfp4": _mxfp4}[target]
    return made(weight_NK.float())


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


def _int4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes -8..7 stored with 8 added; scale = largest / 7.5, rounded to BF16 before it is used."""
    groups = weight.unflatten(1, (-1, INT4_GROUP))
    scale = (groups.abs().amax(-1) / 7.5).bfloat16()
    codes = torch.round(groups / _nonzero(scale.float())[..., None]).clamp(-8, 7) + 8
    return {
        "weight_packed": words_of_nibbles(codes.flatten(1).to(torch.uint8)),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def _fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scale = largest of a block / 448."""
    rows, columns = weight.shape
    pad = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    padded = torch.nn.functional.pad(weight, pad)
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    scale = blocks.abs().amax((1, 3)) / E4M3_MAX
    codes = (blocks / _nonzero(scale)[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    codes = codes.flatten(2).flatten(0, 1)[:rows, :columns]
    return {"weight": codes.to(torch.float8_e4m3fn).contiguous(), "weight_scale": scale}


def _nvfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The matrix scale makes the largest block scale E4M3's largest; as a divisor."""
    groups = weight.unflatten(1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(-1)
    divisor = E4M3_MAX * E2M1_MAX / _nonzero(largest.max())
    # Below E4M3's smallest number a scale would become 0 and its group with it.
    scale = (largest / E2M1_MAX * divisor).clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = _e2m1_codes(groups / (scale.float() / divisor)[..., None])
    return {
        "weight_packed": bytes_of_nibbles(codes.flatten(1)),
        "weight_scale": scale,
        "weight_global_scale": divisor.reshape(1),
    }


def _mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scale = 2^(floor(log2(largest)) - 2): E2M1's largest power of two is 2^2 (OCP MX 1.0)."""
    groups = weight.unflatten(1, (-1, MXFP4_GROUP))
    _, exponent = torch.frexp(groups.abs().amax(-1))
    scale = (exponent - 1 - 2 + 127).clamp(0, 254).to(torch.uint8)
    codes = _e2m1_codes(groups / e8m0(scale)[..., None])
    return {"weight_packed": bytes_of_nibbles(codes.flatten(1)), "weight_scale": scale}


def _e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """The nearest FP4 codes; of two equally near the even one, as hardware does."""
    magnitudes = E2M1_VALUES[:8]
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = values.abs().contiguous()
    up = torch.bucketize(size, middles, right=True)  # a tie goes up
    down = torch.bucketize(size, middles)  # a tie goes down
    code = torch.where(up % 2 == 0, up, down)
    return (code | (torch.signbit(values).long() << 3)).to(torch.uint8)


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """Scales to divide by: 1 where all values are 0."""
    return torch.where(scale == 0, 1.0, scale)
