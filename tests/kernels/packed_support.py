"""What tests of quantised experts share: a format of each kind, and ways to read one wrongly."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hotset.core.formats import MXFP4, NVFP4, PLAIN, WeightFormat, fp8, int4
from kernels.support import Experts, make_experts

# Small blocks and groups, so that small matrices have whole and partial ones of each.
FORMATS = {
    "fp8 block": fp8("bfloat16", block=(16, 8)),
    "fp8 channel": fp8("float32", block=(1, None)),
    "fp8 tensor": fp8("float32", block=(None, None)),
    "mxfp8": fp8("float8_e8m0fnu", block=(1, 32)),
    "int4": int4("float16", group=16),
    "int4 zeros": int4("bfloat16", group=8, has_zeros=True),
    "int4 order": int4("float32", group=8, has_zeros=True, has_order=True),
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
}
# One of each way to decode a code.
KINDS = ("fp8 block", "int4 zeros", "nvfp4", "mxfp4")


def packed_experts(name: str, num_experts: int = 3, **kwargs: object) -> Experts:
    """Random experts of a format; its order of columns is one of the first projection only."""
    weights = FORMATS[name]
    return make_experts(
        num_experts,
        weights=weights,
        down_weights=_without_order(weights),
        **{"hidden": 53, "intermediate": 29, **kwargs},
    )


def up_only(name: str, **kwargs: object) -> Experts:
    return make_experts(1, weights=FORMATS[name], down_weights=PLAIN, **kwargs)


def down_only(name: str, **kwargs: object) -> Experts:
    return make_experts(1, weights=PLAIN, down_weights=_without_order(FORMATS[name]), **kwargs)


def _without_order(weights: WeightFormat) -> WeightFormat:
    return int4("float32", group=8, has_zeros=True) if weights.has_order else weights


Change = Callable[[dict[str, torch.Tensor]], None]


def swap_nibbles(field: dict[str, torch.Tensor]) -> None:
    codes = field["up"]
    codes.copy_((codes << 4) | (codes >> 4))


def drop_global(field: dict[str, torch.Tensor]) -> None:
    field["down_global"].fill_(1.0)


def one_global_for_both(field: dict[str, torch.Tensor]) -> None:
    field["up_global"][1] = field["up_global"][0]


def scale_of_next_group(field: dict[str, torch.Tensor]) -> None:
    field["up_scale"].copy_(field["up_scale"].roll(1, dims=1))


def scale_of_next_row(field: dict[str, torch.Tensor]) -> None:
    field["up_scale"].copy_(field["up_scale"].roll(1, dims=0))


def inverted_scale(field: dict[str, torch.Tensor]) -> None:
    field["up_global"].reciprocal_()


def zero_of_next_group(field: dict[str, torch.Tensor]) -> None:
    field["up_zero"].copy_(field["up_zero"].roll(1, dims=1))


def order_ignored(field: dict[str, torch.Tensor]) -> None:
    field["up_order"].copy_(torch.arange(len(field["up_order"])))


# (format, what a wrong kernel would have read)
MISTAKES: tuple[tuple[str, Change], ...] = (
    ("mxfp4", swap_nibbles),
    ("int4", swap_nibbles),
    ("nvfp4", drop_global),
    ("nvfp4", one_global_for_both),
    ("nvfp4", inverted_scale),
    ("nvfp4", scale_of_next_group),
    ("mxfp4", scale_of_next_row),
    ("fp8 block", scale_of_next_row),
    ("fp8 block", scale_of_next_group),
    ("fp8 channel", scale_of_next_row),
    ("int4 zeros", zero_of_next_group),
    ("int4 order", order_ignored),
)
