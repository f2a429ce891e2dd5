"""Round-to-nearest quantisation of one matrix, in compressed-tensors' layouts.

Scales come from the largest magnitude of each group and every value goes to the nearest code. No
data is looked at: quantisation that is calibrated on data loses less. Plain torch, one matrix at a
time; knows nothing of files or experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hotset.checkpoint.formats.bits import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    bytes_of_nibbles,
    e8m0,
    words_of_nibbles,
)

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


def quantise(weight_NK: torch.Tensor, target: str) -> dict[str, torch.Tensor]:
    """A matrix in one of `TARGETS`: suffix -> tensor, `weight_packed`, `weight_scale`, ...

    Args:
        weight_NK: [N, K], any float dtype, K a multiple of `Target.multiple`.
        target: name of the format.
    """
    made = {"int4": _int4, "fp8": _fp8, "nvfp4": _nvfp4, "mxfp4": _mxfp4}[target]
    return made(weight_NK.float())


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
