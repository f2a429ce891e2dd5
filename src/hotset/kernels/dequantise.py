"""From codes to weights in plain torch: the specification of every weight format.

    e4m3:  w = value(code) * s              int4:  w = (code - zero) * s
    e2m1:  w = value(code) * s              s = scale, or scale * global rounded to FP32

All in FP32, each product rounded once; then w is rounded once to the compute dtype, whatever the
kernel, and multiplied as a plain weight. Codes of one byte are decoded by their bits: exact for
every code, and no hardware or library needs to know the type.
"""

from __future__ import annotations

import torch

from hotset.core.formats import WeightFormat
from hotset.core.geometry import ExpertSpec

Fields = dict[str, torch.Tensor]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Where a format has no zero points.
INT4_ZERO = 8


def decode_e4m3(code: torch.Tensor) -> torch.Tensor:
    """E4M3FN bits (uint8) to FP32: 4 exponent bits of bias 7, no infinities, NaN is 0x7f, 0xff."""
    bits = code.to(torch.int32)
    # As FP32 bits the exponent is short of 127 - 7; the product is exact, subnormals included.
    magnitude = ((bits & 0x7F) << 20).view(torch.float32) * 2.0**120
    magnitude = torch.where((bits & 0x7F) == 0x7F, torch.nan, magnitude)
    return torch.where(bits >= 0x80, -magnitude, magnitude)


def decode_e8m0(code: torch.Tensor) -> torch.Tensor:
    """E8M0 bits (uint8) to FP32: 2^(code - 127), NaN for 255. 2^-127 is subnormal in FP32."""
    bits = code.to(torch.int32)
    bits = torch.where(bits == 0, 0x0040_0000, bits << 23)
    return torch.where(code == 255, torch.nan, bits.view(torch.float32))


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """E2M1 codes (0..15) to FP32."""
    values = torch.tensor(
        [*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float32, device=code.device
    )
    return values[code.long()]


def dequantise_matrix(
    fields: Fields, name: str, weights: WeightFormat, *, halves: int, columns: int
) -> torch.Tensor:
    """One matrix of a record in FP32, not yet rounded to the compute dtype.

    Args:
        fields: of the record, as `reference.record_fields` gives them.
        name: `up` or `down`.
        weights: its format.
        halves: 2 where gate rows come before up rows, otherwise 1.
        columns: K.

    Returns:
        FP32 [halves * N, K], columns in the order of the input.
    """
    if weights.is_plain:
        return fields[name].float()
    if weights.is_lossless:
        return unpack_lossless(fields, name, columns=columns).float()
    codes = _unpack(fields[name], weights)[:, :columns]
    scale = _decode_scale(fields[f"{name}_scale"], weights)
    if weights.has_global:
        per_half = fields[f"{name}_global"].repeat_interleave(len(scale) // halves)
        scale = scale * per_half[:, None]
    rows = len(codes) // halves
    spread = _spread(scale, weights, halves=halves, rows=rows, columns=columns)
    if weights.name == "int4":
        zero: torch.Tensor | int = INT4_ZERO
        if weights.has_zeros:
            zero = fields[f"{name}_zero"].float()
            zero = _spread(zero, weights, halves=halves, rows=rows, columns=columns)
        weight = (codes.float() - zero) * spread
    elif weights.name == "fp8":
        weight = decode_e4m3(codes) * spread
    else:
        weight = decode_e2m1(codes) * spread
    if weights.has_order:
        ordered = torch.empty_like(weight)
        ordered[:, fields[f"{name}_order"].long()] = weight
        weight = ordered
    return weight


def unpack_lossless(fields: Fields, name: str, *, columns: int) -> torch.Tensor:
    """The weights of a matrix of `core.formats.lossless_fields`: BF16 [N, K], every bit."""
    number = fields[name].int()
    words = fields[f"{name}_exponent"].view(torch.int32)
    shifts = torch.tensor([4 * (c // 2) + 16 * (c % 2) for c in range(8)], device=number.device)
    code = ((words[:, :, None] >> shifts) & 0xF).flatten(1).int()
    header = fields[f"{name}_row"][:, None]
    # A base of 255 is poison, and shall be NaN.
    exponent = (header & 0xFF).clamp(max=240) + code
    bits = (number & 0x80) << 8 | exponent << 7 | number & 0x7F
    table = fields[f"{name}_rare"].flatten().int()
    # What is no number into the table must not be looked up, poison least of all.
    place = torch.where(code == 0, ((header >> 8) & 0xFFFFFF) + number, 0)
    bits = torch.where(code == 0, table[place.long()], bits)
    return bits.to(torch.int16).view(torch.bfloat16)[:, :columns]


def dequantise(fields: Fields, spec: ExpertSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Both matrices of a record in FP32, not yet rounded: up [2I or I, H], down [H, I]."""
    halves = 2 if spec.gate.has_gate else 1
    up = dequantise_matrix(fields, "up", spec.up_format, halves=halves, columns=spec.hidden)
    down = dequantise_matrix(fields, "down", spec.down_format, halves=1, columns=spec.intermediate)
    return up, down


def multiplied_weights(fields: Fields, spec: ExpertSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Both matrices as kernels multiply them: rounded to the compute dtype, held in FP32."""
    up, down = dequantise(fields, spec)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype == torch.float32 or spec.is_plain:
        return up, down
    return up.to(dtype).float(), down.to(dtype).float()


def _unpack(packed: torch.Tensor, weights: WeightFormat) -> torch.Tensor:
    """Bytes of rows [N, row bytes] to codes [N, K and padding], uint8."""
    if weights.name == "fp8":
        return packed
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def _decode_scale(scale: torch.Tensor, weights: WeightFormat) -> torch.Tensor:
    match weights.scale_dtype:
        case "float8_e4m3fn":
            return decode_e4m3(scale)
        case "float8_e8m0fnu":
            return decode_e8m0(scale)
        case _:
            return scale.float()


def _spread(
    grid: torch.Tensor, weights: WeightFormat, *, halves: int, rows: int, columns: int
) -> torch.Tensor:
    """[halves * blocks, groups] to a value for each weight, [halves * rows, columns]."""
    per_row = grid.unflatten(0, (halves, -1))
    row = torch.arange(rows, device=grid.device) // (weights.scale_rows or rows)
    column = torch.arange(columns, device=grid.device) // (weights.scale_columns or columns)
    spread: torch.Tensor = per_row[:, row][:, :, column].flatten(0, 1)
    return spread
