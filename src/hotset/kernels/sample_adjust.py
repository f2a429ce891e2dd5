"""Bias, penalties and masks on the device, in one launch.

The specification, formulas included, is `sample_adjust_reference`; results are equal to its bits.
A program of a row that asks for nothing reads one flag and ends. Never waits for the device.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotset.kernels import sample_adjust_reference
from hotset.kernels.sample_adjust_reference import Adjustments

_CHUNK = 1024  # tokens of a program


@triton.jit
def _adjust_kernel(
    logits_BV,
    rows_B,
    is_on_R,
    bias_RV,
    repetition_R,
    frequency_R,
    presence_R,
    prompted_RV,
    generated_RV,
    is_masked_R,
    mask_RW,
    adjusted_BV,
    vocab,
    num_words,
    row_stride,
    limit,
    CHUNK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_B + place)
    if tl.load(is_on_R + row).to(tl.int32) != 0:
        token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        live = token < vocab
        raw = tl.load(logits_BV + place * row_stride + token, mask=live, other=0.0).to(tl.float32)
        finite = (raw.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
        own = row * vocab + token
        x = tl.where(finite, raw, 0.0) + tl.load(bias_RV + own, mask=live, other=0.0)
        c = tl.load(generated_RV + own, mask=live, other=0)
        prompted = tl.load(prompted_RV + own, mask=live, other=0).to(tl.int32) != 0
        repetition = tl.load(repetition_R + row) + tl.zeros_like(x)
        seen = (c > 0) | prompted
        x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        x = x - tl.load(frequency_R + row) * c.to(tl.float32)
        x = tl.where(c > 0, x - tl.load(presence_R + row), x)
        x = tl.minimum(tl.maximum(x, -limit), limit)
        if tl.load(is_masked_R + row).to(tl.int32) != 0:
            word = tl.load(mask_RW + row * num_words + token // 32, mask=live, other=0)
            x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
        x = tl.where(finite, x, float("nan"))
        tl.store(adjusted_BV + place * vocab + token, x, mask=live)


def adjust(
    logits_BV: torch.Tensor,
    adjustments: Adjustments,
    rows_B: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Adjusted logits of rows that ask for it, float32.

    Args:
        logits_BV: [B, V], any float dtype; places may have any stride.
        adjustments: of R rows.
        rows_B: int64, the row of each place.
        out: at least B places of V, contiguous. Those of rows that ask for nothing stay as they
            are.

    Returns:
        The first B places of `out`.
    """
    if logits_BV.is_cuda:
        return launch_adjust(logits_BV, adjustments, rows_B, out=out)
    if bool(adjustments.is_on_R[rows_B].any()):  # asking costs nothing here
        out[: len(rows_B)] = sample_adjust_reference.adjust(logits_BV, adjustments, rows_B)
    return out[: len(rows_B)]


def launch_adjust(
    logits_BV: torch.Tensor,
    adjustments: Adjustments,
    rows_B: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """`adjust` by the kernel above."""
    num_places, vocab = logits_BV.shape
    own = adjustments
    assert logits_BV.stride(1) == 1 and out.is_contiguous() and out.shape[1] == vocab
    _adjust_kernel[(num_places, triton.cdiv(vocab, _CHUNK))](
        logits_BV,
        rows_B,
        own.is_on_R,
        own.bias_RV,
        own.repetition_R,
        own.frequency_R,
        own.presence_R,
        own.prompted_RV,
        own.generated_RV,
        own.is_masked_R,
        own.mask_RW,
        out,
        vocab,
        own.mask_RW.shape[1],
        logits_BV.stride(0),
        torch.finfo(logits_BV.dtype).max,
        CHUNK=_CHUNK,
        num_warps=4,
        enable_fp_fusion=False,  # bits of the specification
    )
    return out[:num_places]
