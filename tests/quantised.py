"""Quantised matrices in every published layout, packed here bit by bit, with what they mean.

Packs by plain loops over positions in words and shares nothing with the package; the values are
random codes under plausible scales, and the matrix that they stand for is computed beside them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)

Group = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Dialect:
    """A layout: how a config declares it, and how a random matrix is made in it.

    Attributes:
        config: `quantization_config`.
        make: (N, K, generator) -> tensors by suffix, and the matrix [N, K] float32.
    """

    config: dict[str, Any]
    make: Callable[[int, int, torch.Generator], tuple[Group, torch.Tensor]]


def words(codes: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Codes 0..15 to int32, eight along `dim`; `order[p]` is the code in nibble p."""
    eights = codes.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    packed = sum(eights[..., code] << (4 * place) for place, code in enumerate(order))
    return torch.as_tensor(packed).to(torch.int32).movedim(-1, dim).contiguous()


def pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 to bytes, even columns low."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)


def _codes(rows: int, columns: int, rng: torch.Generator, below: int = 16) -> torch.Tensor:
    return torch.randint(0, below, (rows, columns), generator=rng, dtype=torch.int32)


def _scales(rows: int, groups: int, rng: torch.Generator, typical: float) -> torch.Tensor:
    return typical * (0.5 + torch.rand(rows, groups, generator=rng))


def _int4(
    rows: int, columns: int, rng: torch.Generator, *, size: int, zeros: bool, shuffled: bool = False
) -> tuple[torch.Tensor, ...]:
    """Codes [N, K], zero points and FP16 scales [N, G], group of each column, and the matrix."""
    codes, num_groups = _codes(rows, columns, rng), -(-columns // size)
    scale = _scales(rows, num_groups, rng, 0.03).half()
    zero = _codes(rows, num_groups, rng) if zeros else torch.full((rows, num_groups), 8)
    group_K = torch.arange(columns) // size
    if shuffled:
        group_K = group_K[torch.randperm(columns, generator=rng)]
    matrix = (codes - zero[:, group_K]).float() * scale.float()[:, group_K]
    return codes, zero, scale, group_K, matrix


def compressed_int4(*, size: int = 16, zeros: bool = False, ordered: bool = False) -> Dialect:
    def make(rows: int, columns: int, rng: torch.Generator) -> tuple[Group, torch.Tensor]:
        made = _int4(rows, columns, rng, size=size, zeros=zeros, shuffled=ordered)
        codes, zero, scale, group_K, matrix = made
        group = {
            "weight_packed": words(codes, 1),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if zeros:
            group["weight_zero_point"] = words(zero, 0)
        if ordered:
            group["weight_g_idx"] = group_K.int()
        return group, matrix

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}
    weights |= {"symmetric": not zeros, "actorder": "group" if ordered else None}
    return Dialect(_compressed("pack-quantized", weights), make)


def gptq(*, version: int = 1, sym: bool = True, size: int = 16, ordered: bool = False) -> Dialect:
    def make(rows: int, columns: int, rng: torch.Generator) -> tuple[Group, torch.Tensor]:
        made = _int4(rows, columns, rng, size=size, zeros=not sym, shuffled=False)
        codes, zero, scale, group_K, matrix = made
        if version == 1:  # stores one less than it means, so 0 cannot be said
            zero = zero.clamp(min=1)
            matrix = (codes - zero[:, group_K]).float() * scale.float()[:, group_K]
        if ordered:  # all matrices of one input have one order: by the number of columns
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
            codes, group_K, matrix = codes[:, order], group_K[order], matrix[:, order]
        return {
            "qweight": words(codes.T, 0),
            "qzeros": words(zero.T - int(version == 1), 1),
            "scales": scale.T.contiguous(),
            "g_idx": group_K.int(),
        }, matrix

    config = {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": sym}
    name = "gptq" if version == 1 else "gptq_v2"
    return Dialect({**config, "desc_act": ordered, "checkpoint_format": name}, make)


def awq(*, size: int = 16) -> Dialect:
    def make(rows: int, columns: int, rng: torch.Generator) -> tuple[Group, torch.Tensor]:
        codes, zero, scale, _, matrix = _int4(rows, columns, rng, size=size, zeros=True)
        return {
            "qweight": words(codes.T, 1, AWQ_COLUMN_OF_NIBBLE),
            "qzeros": words(zero.T, 1, AWQ_COLUMN_OF_NIBBLE),
            "scales": scale.T.contiguous(),
        }, matrix

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True}
    return Dialect({**config, "version": "gemm"}, make)


def fp8(block: tuple[int, int] | None, *, name: str, dtype: torch.dtype, **config: Any) -> Dialect:
    """One scale for each block, row (1, 0) or matrix (`None`)."""

    def make(rows: int, columns: int, rng: torch.Generator) -> tuple[Group, torch.Tensor]:
        height, width = block or (rows, columns)
        width = width or columns
        bits = _codes(rows, columns, rng, 0x7F) | (_codes(rows, columns, rng, 2) << 7)
        codes = bits.to(torch.uint8).view(torch.float8_e4m3fn)
        grid = (-(-rows // height), -(-columns // width))
        if dtype is torch.uint8:  # E8M0
            scale = torch.randint(115, 119, grid, generator=rng, dtype=torch.uint8)
            factor = 2.0 ** (scale.double() - 127)
        else:
            scale = _scales(*grid, rng, 0.001).to(dtype)
            factor = scale.double()
        spread = factor.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        matrix = codes.float() * spread.float()
        return {"weight": codes, name: scale.reshape(1) if block is None else scale}, matrix

    return Dialect(config, make)


def int8(*, packed: bool, size: int = 0) -> Dialect:
    """A scale for each row, or for `size` values of one."""

    def make(rows: int, columns: int, rng: torch.Generator) -> tuple[Group, torch.Tensor]:
        codes = torch.randint(-128, 128, (rows, columns), generator=rng)
        scale = _scales(rows, columns // (size or columns), rng, 0.001).to(torch.bfloat16)
        matrix = codes.float() * scale.float().repeat_interleave(size or columns, 1)
        if not packed:
            return {"weight": codes.to(torch.int8), "weight_scale": scale}, matrix
        fours = (codes + 128).unflatten(1, (-1, 4))
        word = sum(fours[..., place] << (8 * place) for place in range(4))
        group = {
            "weight_packed": torch.as_tensor(word).to(torch.int32),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        return group, matrix

    weights = {"num_bits": 8, "type": "int", "symmetric": True}
    weights |= {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    return Dialect(_compressed("pack-quantized" if packed else "int-quantized", weights), make)


def nvfp4(*, compressed: bool) -> Dialect:
    def make(rows: int, columns: int, rng: torch.Generator) -> tuple[Group, torch.Tensor]:
        codes = _codes(rows, columns, rng)
        scale = _scales(rows, -(-columns // 16), rng, 100.0).to(torch.float8_e4m3fn)
        # A power of two, so that divisor and multiplier mean the same to the last bit.
        whole = 2.0 ** -torch.randint(10, 13, (1,), generator=rng).float()
        factor = (scale.float() * whole).repeat_interleave(16, 1)[:, :columns]
        matrix = E2M1[codes.long()] * factor
        if compressed:
            return {
                "weight_packed": pairs(codes),
                "weight_scale": scale,
                "weight_global_scale": 1 / whole,
            }, matrix
        return {
            "weight": pairs(codes),
            "weight_scale": scale,
            "weight_scale_2": whole.reshape(()),
            "input_scale": torch.tensor(1.0),
        }, matrix

    if compressed:
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        return Dialect(_compressed("nvfp4-pack-quantized", weights), make)
    return Dialect({"quant_method": "modelopt", "quant_algo": "NVFP4"}, make)


def mxfp4(*, compressed: bool) -> Dialect:
    names = ("weight_packed", "weight_scale") if compressed else ("weight", "scale")

    def make(rows: int, columns: int, rng: torch.Generator) -> tuple[Group, torch.Tensor]:
        codes = _codes(rows, columns, rng)
        grid = (rows, -(-columns // 32))
        scale = torch.randint(120, 124, grid, generator=rng, dtype=torch.uint8)
        factor = (2.0 ** (scale.double() - 127)).float().repeat_interleave(32, 1)[:, :columns]
        packed = pairs(codes)
        if not compressed:
            packed, scale = packed.view(torch.int8), scale.view(torch.float8_e8m0fnu)
        return {names[0]: packed, names[1]: scale}, E2M1[codes.long()] * factor

    if compressed:
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        return Dialect(_compressed("mxfp4-pack-quantized", weights), make)
    return Dialect({"quant_method": "fp8", "expert_dtype": "fp4"}, make)


def _compressed(name: str, weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}


_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_FLOAT = {"num_bits": 8, "type": "float"}

DIALECTS: dict[str, Dialect] = {
    "fp8 blocks": fp8((128, 128), name="weight_scale_inv", dtype=torch.float32, **_BLOCK),
    "fp8 blocks, bf16 scales": fp8(
        (128, 128), name="weight_scale_inv", dtype=torch.bfloat16, **_BLOCK
    ),
    "fp8 partial blocks": fp8(
        (24, 24), name="scale", dtype=torch.uint8, quant_method="fp8", weight_block_size=[24, 24]
    ),
    "fp8 rows": fp8(
        (1, 0),
        name="weight_scale",
        dtype=torch.bfloat16,
        **_compressed("float-quantized", {**_FLOAT, "strategy": "channel"}),
    ),
    "fp8 matrix": fp8(
        None, name="weight_scale", dtype=torch.float32, quant_method="modelopt", quant_algo="FP8"
    ),
    "mxfp8": fp8((1, 32), name="weight_scale", dtype=torch.uint8, quant_method="mxfp8"),
    "mxfp4, compressed-tensors": mxfp4(compressed=True),
    "mxfp4, DeepSeek": mxfp4(compressed=False),
    "int4": compressed_int4(),
    "int4 with zero points": compressed_int4(zeros=True),
    "nvfp4, compressed-tensors": nvfp4(compressed=True),
    "nvfp4, ModelOpt": nvfp4(compressed=False),
    "gptq": gptq(),
    "gptq v2": gptq(version=2),
    "gptq, asymmetric": gptq(sym=False),
    "gptq v2, asymmetric": gptq(version=2, sym=False),
    "gptq, activation order": gptq(sym=False, ordered=True),
    "awq": awq(),
}


def _matrices(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A tensor by its name; one of all experts as tools take it apart that quantise layers."""
    head, _, last = name.rpartition(".")
    if not head.endswith(".experts") or last not in ("gate_up_proj", "down_proj"):
        return [(name, tensor)]
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    return [
        (f"{head}.{expert}.{part}.weight", rows)
        for expert, matrix in enumerate(tensor)
        for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
    ]


EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")


def quantise_folder(
    plain: Path,
    output: Path,
    dialect_of: Callable[[str], Dialect | None],
    *,
    config: dict[str, Any],
    seed: int = 0,
) -> None:
    """Makes a quantised checkpoint of a plain one, and the plain one hold the same weights.

    Args:
        plain: with one file of weights.
        output: is made.
        dialect_of: of a tensor by its name; `None` keeps it.
        config: `quantization_config`.
    """
    shutil.copytree(plain, output)
    rng = torch.Generator().manual_seed(seed)
    tensors = load_file(plain / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in list(tensors.items()):
        for one, rows in _matrices(name, tensor):
            dialect = dialect_of(one)
            if dialect is None:
                packed[name] = tensor
                continue
            group, matrix = dialect.make(*rows.shape, rng)
            rows.copy_(matrix)
            head = one.removesuffix(".weight")
            packed |= {f"{head}.{suffix}": value for suffix, value in group.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, output / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
