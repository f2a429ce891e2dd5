"""Random bytes that mean plausible experts, in every weight format.

Codes are uniform over all that are numbers; scales are chosen so that weights have a given
standard deviation and differ between neighbours, so that a scale taken from the wrong place shows.
"""

from __future__ import annotations

import torch

from hotset.checkpoint.lossless import pack_lossless
from hotset.core.formats import WeightFormat
from hotset.core.geometry import ExpertSpec
from hotset.core.record import Field
from hotset.kernels.dequantise import E2M1_VALUES, decode_e4m3
from hotset.kernels.reference import record_fields

_BIAS_STD = 0.3
# Scales are the mean one times 2^u, u uniform between these.
_SCALE_SPREAD = (-1.0, 0.5)
# What the others are multiplied by where there is a global scale: well inside E4M3.
_LOCAL_SCALE = 16.0


def fill_random(
    records_ND: torch.Tensor,
    spec: ExpertSpec,
    generator: torch.Generator,
    *,
    std: float | None = None,
) -> None:
    """Overwrites the fields of N records, and no byte between them.

    Args:
        records_ND: uint8 [N, record_bytes], contiguous rows.
        spec: what each record is.
        generator: on the records' device.
        std: of the weights; one over the root of a row's length where it is `None`, which keeps
            activations of order 1. Biases have 0.3.
    """
    formats = {"up": (spec.up_format, spec.hidden), "down": (spec.down_format, spec.intermediate)}
    for field in spec.layout.fields:
        name, _, part = field.name.partition("_")
        form, columns = formats[name]
        want = columns**-0.5 if std is None else std
        view = _field_of_all(records_ND, field)
        if part == "bias":
            view.copy_(_normal(view, generator) * _BIAS_STD)
        elif form.is_lossless:
            if part == "":
                _fill_lossless(records_ND, spec, name, columns, want, generator)
        elif part == "" and form.is_plain:
            view.copy_(_normal(view, generator) * want)
        else:
            view.copy_(_part(part, view, form, want, generator))


def _fill_lossless(
    records_ND: torch.Tensor,
    spec: ExpertSpec,
    name: str,
    columns: int,
    std: float,
    generator: torch.Generator,
) -> None:
    """All fields of a matrix of `lossless`, which belong together: of the weights that are drawn
    for a plain one."""
    for record in records_ND:
        fields = record_fields(record, spec)
        weights = fields[name].new_empty(len(fields[name]), columns, dtype=torch.bfloat16)
        weights.copy_(_normal(weights, generator) * std)
        packed = pack_lossless(weights, fields, name)
        assert packed, "normally distributed weights have few rare ones"


def _field_of_all(records_ND: torch.Tensor, field: Field) -> torch.Tensor:
    """A view [N, *shape] of one field of all records."""
    of_all = records_ND[:, field.offset : field.offset + field.nbytes]
    view: torch.Tensor = of_all.view(getattr(torch, field.dtype)).unflatten(1, field.shape)
    return view


def _part(
    part: str, view: torch.Tensor, form: WeightFormat, std: float, generator: torch.Generator
) -> torch.Tensor:
    """Values for one field of a quantised matrix."""
    match part:
        case "":
            return _codes(view, form, generator)
        case "zero":
            return torch.randint(4, 13, view.shape, generator=generator, device=view.device)
        case "global":
            mean = std / _code_rms(form) / _LOCAL_SCALE
            return (_uniform(view, generator) * 0.5 + 0.75) * mean
        case "order":
            keys = _uniform(view, generator)
            return keys.argsort(dim=-1)
        case _:
            return _scales(view, form, std, generator)


def _codes(view: torch.Tensor, form: WeightFormat, generator: torch.Generator) -> torch.Tensor:
    codes = torch.randint(
        256, view.shape, dtype=torch.uint8, generator=generator, device=view.device
    )
    if form.name == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0x7E  # the two that are NaN
    return codes


def _scales(
    view: torch.Tensor, form: WeightFormat, std: float, generator: torch.Generator
) -> torch.Tensor:
    """Scales as numbers, or as codes where the format has codes of one byte."""
    low, high = _SCALE_SPREAD
    exponent = _uniform(view, generator) * (high - low) + low
    mean = _LOCAL_SCALE if form.has_global else std / _code_rms(form)
    scale = torch.exp2(exponent) * mean
    if form.scale_dtype == "float8_e4m3fn":
        return scale.to(torch.float8_e4m3fn).view(torch.uint8)
    if form.scale_dtype == "float8_e8m0fnu":
        return scale.log2().round() + 127
    return scale


def _code_rms(form: WeightFormat) -> float:
    """Root mean square of `value(code)` over uniform codes."""
    if form.name == "fp8":
        value = decode_e4m3(torch.arange(256, dtype=torch.uint8)).nan_to_num(0.0)
    elif form.name == "int4":
        value = torch.arange(-8.0, 8.0)
    else:
        value = torch.tensor(E2M1_VALUES)
    return value.square().mean().sqrt().item()


def _normal(view: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(view.shape, generator=generator, device=view.device)


def _uniform(view: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(view.shape, generator=generator, device=view.device)
