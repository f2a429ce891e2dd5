"""FP8 (E4M3) weights with a scale for each block, row, or the whole matrix.

    W[n, k] = e4m3(weight[n, k]) * scale[n // rows, k // columns]

Multiplied, also where the scales are called `weight_scale_inv`. In files as DeepSeek, Qwen, GLM and
MiniMax publish them (blocks of 128 x 128, scales FP32, BF16 or E8M0, the last block may be
partial), as compressed-tensors writes them (a scale for a row, the matrix, or a block), as ModelOpt
does (one for the matrix), and MXFP8 (32 values of a row, E8M0). All experts of a layer in one
tensor as transformers holds them (`gate_up_proj` [E, N, K], `gate_up_proj_scale_inv`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from hotset.checkpoint.formats.base import (
    UNNAMED,
    Group,
    MatrixFormat,
    Naming,
    Tensors,
    expect,
    located,
    one_byte,
)
from hotset.checkpoint.formats.bits import E4M3_MAX, as_float, spread
from hotset.checkpoint.index import TensorEntry
from hotset.checkpoint.quantised import Declared
from hotset.core.errors import CheckpointError
from hotset.core.formats import WeightFormat, fp8

_CODES = ("float8_e4m3fn",)
_SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8")
# Scales of activations, for hardware that multiplies in FP8; hotset multiplies in 16 bits.
_ACTIVATIONS = ("input_scale", "activation_scale", "qscale_act")
_SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")

_MOST_BLOCK = 2**31  # torch repeats a scale no more often than it can count
_DEFAULT_BLOCK = (128, 128)
_MX_BLOCK = (1, 32)


@dataclass(frozen=True)
class Fp8(MatrixFormat):
    """See the module.

    Attributes:
        scale_name: suffix of the scales.
        scale_dtype: theirs; one byte is E8M0.
        block: [rows, columns] that share a scale; `None` is all of them.
    """

    scale_name: str
    scale_dtype: str
    block: tuple[int | None, int | None]

    label = "FP8"
    namings = (
        *(Naming("weight", _CODES, (scale,), _ACTIVATIONS) for scale in _SCALES),
        Naming(UNNAMED, _CODES, ("scale_inv",), _ACTIVATIONS),
    )
    methods = (
        ("fp8", ""),
        ("mxfp8", ""),
        ("compressed-tensors", "float-quantized"),
        ("compressed-tensors", "naive-quantized"),
        ("compressed-tensors", "mxfp8"),
        ("compressed-tensors", "mixed-precision"),
        ("modelopt", "FP8"),
        ("modelopt", "MIXED_PRECISION"),
    )
    unused = frozenset(_ACTIVATIONS)
    most_typical = 2 * E4M3_MAX  # some files are cast without scaling: all scales are 1

    @classmethod
    def recognise(cls, group: Group, declared: Declared | None) -> Self | None:
        naming = next(naming for naming in cls.namings if naming.fits(group))
        name = naming.required[0]
        weight, scales = group[naming.codes], group[name]
        expect(weight, (None, None, None) if naming.codes == UNNAMED else (None, None))
        expect(scales, scales.shape, _SCALE_DTYPES)
        dtype = "float8_e8m0fnu" if scales.dtype == "uint8" else scales.dtype
        if naming.codes == UNNAMED and scales.shape[:1] != weight.shape[:1]:
            raise CheckpointError(
                f"{located(scales)} has shape {list(scales.shape)}, expected scales for each of "
                f"{weight.shape[0]} experts"
            )
        return cls(weight.shape, name, dtype, _block(weight, scales, declared))

    @classmethod
    def declared_weights(cls, declared: Declared) -> WeightFormat | None:
        if declared.method == "mxfp8":
            return fp8("float8_e8m0fnu", block=_MX_BLOCK)
        if declared.method == "fp8":
            return fp8("float32", block=next(_declared_blocks(declared), _DEFAULT_BLOCK))
        if declared.method == "modelopt":
            return fp8("float32", block=(None, None)) if "FP8" in declared.name else None
        for weights in declared.weight_groups:
            if weights.get("num_bits") == 8 and weights.get("type") == "float":
                block = next(_declared_blocks(declared), None)
                rows = None if weights.get("strategy") == "tensor" else 1
                return fp8("float32", block=block or (rows, None))
        return None

    @property
    def weights(self) -> WeightFormat:
        return fp8(self.scale_dtype, block=self.block)

    @property
    def scale(self) -> str:
        return self.scale_name

    @property
    def as_stored(self) -> Mapping[str, str]:
        # The record pads a row to whole words.
        codes = {self._codes_name: ""} if self.shape[-1] % 4 == 0 else {}
        return codes | {self.scale: "_scale"}

    def codes(self, tensors: Tensors) -> torch.Tensor:
        codes = tensors[self._codes_name].view(torch.uint8)
        return torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4))

    def companions(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {"_scale": one_byte(self._grid(tensors[self.scale]))}

    def dequantise(self, tensors: Tensors) -> torch.Tensor:
        rows, columns = self.shape[-2:]
        sizes = (self.block[0] or rows, self.block[1] or columns)
        scales = self._grid(as_float(tensors[self.scale]))
        return tensors[self._codes_name].float() * spread(scales, sizes, (rows, columns))

    def largest(self, tensors: Tensors) -> torch.Tensor:
        return as_float(tensors[self.scale]).abs() * E4M3_MAX

    def _grid(self, scales: torch.Tensor) -> torch.Tensor:
        """[blocks along N, blocks along K]."""
        return scales.reshape(self.weights.num_blocks(self.shape[-2]), -1)

    @property
    def _codes_name(self) -> str:
        return UNNAMED if len(self.shape) == 3 else "weight"


def _block(
    weight: TensorEntry, scales: TensorEntry, declared: Declared | None
) -> tuple[int | None, int | None]:
    """What shares a scale, from the config, else from the shapes where they leave no doubt."""
    (*fused, rows, columns), shape = weight.shape, scales.shape
    if fused:  # both are those of one expert after another
        shape = shape[1:]
    # 2 x 2 scales may mean several sizes: a size is taken from the config or is the usual one.
    for block in (*_declared_blocks(declared), _DEFAULT_BLOCK, _MX_BLOCK):
        if shape == (-(-rows // block[0]), -(-columns // block[1])):
            if block[1] % 8:
                raise CheckpointError(
                    f"`weight_block_size` is {list(block)}, hotset reads multiples of 8 columns"
                )
            return block
    if shape in ((rows, 1), (rows,)):
        return 1, None
    if torch.Size(shape).numel() == 1:
        return None, None
    raise CheckpointError(
        f"{located(scales)} has shape {list(scales.shape)} for weights of {rows} x {columns}, "
        "expected one scale for each block of 128 x 128, row, or matrix",
        hint="a `weight_block_size` in `quantization_config` names another block",
    )


def _declared_blocks(declared: Declared | None) -> Iterator[tuple[int, int]]:
    if declared is None:
        return
    sizes = [declared.values.get("weight_block_size")]
    sizes += [weights.get("block_structure") for weights in declared.weight_groups]
    for size in sizes:
        if not isinstance(size, list):
            continue
        if len(size) != 2 or not all(isinstance(n, int) and 0 < n < _MOST_BLOCK for n in size):
            raise CheckpointError(
                f"`{declared.path}` says blocks of {size}, expected rows and columns from 1 to "
                f"{_MOST_BLOCK - 1}",
                hint="fetch the `config.json` that belongs to these files",
            )
        yield size[0], size[1]
