"""The specification of every weight format: tables of all codes, formulas number by number."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from hotset.core.formats import MXFP4, NVFP4, PLAIN, WeightFormat, fp8, int4
from hotset.core.geometry import ExpertSpec
from hotset.kernels import dequantise as spec_of
from hotset.kernels.reference import record_fields
from kernels.support import SILU

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def same(got: torch.Tensor, expected: list[float]) -> None:
    """Bit for bit, but for the sign and payload of NaN."""
    want = torch.tensor(expected, dtype=torch.float64)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.double().nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def test_all_codes_of_e4m3() -> None:
    got = spec_of.decode_e4m3(ALL_BYTES)
    same(got, [e4m3(code) for code in range(256)])
    same(got, ALL_BYTES.view(torch.float8_e4m3fn).double().tolist())


def test_all_codes_of_e8m0() -> None:
    same(spec_of.decode_e8m0(ALL_BYTES), [e8m0(code) for code in range(256)])


def test_all_codes_of_e2m1() -> None:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    same(spec_of.decode_e2m1(torch.arange(16)), positive + [-value for value in positive])


def f32(value: float) -> float:
    """Rounded to FP32, by the standard library."""
    return struct.unpack("f", struct.pack("f", value))[0]


FORMATS = {
    "fp8 block": fp8("bfloat16", block=(16, 8)),
    "fp8 channel": fp8("float32", block=(1, None)),
    "fp8 tensor": fp8("float32", block=(None, None)),
    "fp8 e8m0": fp8("float8_e8m0fnu", block=(1, 32)),
    "int4": int4("float16", group=16),
    "int4 zeros": int4("bfloat16", group=8, has_zeros=True),
    "int4 order": int4("float16", group=8, has_zeros=True, has_order=True),
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
}


def weight(
    fields: dict[str, torch.Tensor], form: WeightFormat, place: tuple[int, int, int]
) -> float:
    """W_up[half, row, column of the codes], from the bytes, one number at a time."""
    half, row, column = place
    inter = len(fields["up"]) // 2
    packed = fields["up"][half * inter + row]
    if form.name == "fp8":
        value = e4m3(int(packed[column]))
    else:
        code = int(packed[column // 2]) >> (4 * (column % 2)) & 0xF
        value = (-1.0 if code & 8 else 1.0) * [0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7]
    grid = fields["up_scale"]
    block = 0 if form.scale_rows is None else row // form.scale_rows
    group = 0 if form.scale_columns is None else column // form.scale_columns
    at = (half * (len(grid) // 2) + block, group)
    decode = {"float8_e4m3fn": e4m3, "float8_e8m0fnu": e8m0}.get(form.scale_dtype, float)
    scale = decode(grid[at].item())
    if form.name == "int4":
        value = code - (int(fields["up_zero"][at]) if form.has_zeros else 8)
    if form.has_global:
        scale = f32(scale * float(fields["up_global"][half]))
    return f32(value * scale)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_formulas(form: WeightFormat) -> None:
    """Partial groups, blocks and words: 37 columns, and 21 rows a half."""
    spec = ExpertSpec.build(
        hidden=37,
        intermediate=21,
        gate=SILU,
        has_bias=False,
        dtype="bfloat16",
        weights=form,
        down_weights=PLAIN,
    )
    fields = random_fields(spec)
    up, down = spec_of.dequantise(fields, spec)
    assert up.dtype == torch.float32 and up.shape == (42, 37)
    expected = torch.empty(2, 21, 37, dtype=torch.float64)
    for half in range(2):
        for row in range(21):
            for column in range(37):
                to = int(fields["up_order"][column]) if form.has_order else column
                expected[half, row, to] = weight(fields, form, (half, row, column))
    same(up, expected.flatten(0, 1).tolist())
    assert torch.equal(down, fields["down"].float())
    rounded, _ = spec_of.multiplied_weights(fields, spec)
    same(rounded, up.to(torch.bfloat16).double().tolist())


def random_fields(spec: ExpertSpec) -> dict[str, torch.Tensor]:
    """Any bytes where bytes are codes, numbers of order 1 elsewhere; no NaN scale."""
    source = torch.Generator().manual_seed(0)
    record = torch.randint(256, (spec.record_bytes,), dtype=torch.uint8, generator=source)
    fields = record_fields(record, spec)
    for name, value in fields.items():
        if name.endswith("order"):
            value.copy_(torch.randperm(len(value), generator=source))
        elif name.endswith("zero"):
            value.copy_(value % 17)
        elif name.endswith("scale") and value.dtype == torch.uint8:
            value.clamp_(1, 0x7E)
        elif value.dtype != torch.uint8:
            value.copy_(torch.randn(value.shape, generator=source))
    return fields
