"""The specification of what changes a row's logits before a token is drawn: bias, penalties, mask.

    x = logit + bias                                            FP32, in this order
    x = x / r if x > 0 else x * r      of tokens in prompt or answer (repetition penalty r)
    x = x - frequency * c              c times in the answer so far
    x = x - presence                   if c > 0
    x = -inf                           of tokens that the mask does not allow

Bias and penalties in the order of transformers and vLLM; frequency and presence as OpenAI
publishes them, where c counts sampled tokens only; the repetition penalty of Keskar et al., "CTRL"
(2019), which counts the prompt too. x is kept finite in the logits' own dtype before the mask; a
logit that is not finite becomes NaN, so that it is noticed. Rows that ask for nothing are left
alone. Never waits for the device.

Letters: B places of a step, R rows whose state is kept, V vocabulary, W = ceil(V / 32) words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Adjustments:
    """What each row asks for; tensors on the device of the logits, at fixed addresses.

    Attributes:
        is_on_R: bool, whether a row asks for any of this. It may have more rows than the rest:
            those are padding and never ask.
        bias_RV: float32.
        repetition_R, frequency_R, presence_R: float32; 1, 0 and 0 are off.
        prompted_RV: bool, tokens of the prompt.
        generated_RV: int32, how often the answer has each token.
        is_masked_R: bool, whether the mask counts.
        mask_RW: int32, bit t % 32 of word t // 32 is set if token t is allowed.
    """

    is_on_R: torch.Tensor
    bias_RV: torch.Tensor
    repetition_R: torch.Tensor
    frequency_R: torch.Tensor
    presence_R: torch.Tensor
    prompted_RV: torch.Tensor
    generated_RV: torch.Tensor
    is_masked_R: torch.Tensor
    mask_RW: torch.Tensor

    @classmethod
    def off(
        cls, num_rows: int, vocab: int, *, num_padding: int = 0, device: torch.device
    ) -> Adjustments:
        """Rows that ask for nothing, to be changed in place."""

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            is_on_R=torch.zeros(num_rows + num_padding, dtype=torch.bool, device=device),
            bias_RV=zeros(vocab, dtype=torch.float32),
            repetition_R=torch.ones(num_rows, device=device),
            frequency_R=zeros(dtype=torch.float32),
            presence_R=zeros(dtype=torch.float32),
            prompted_RV=zeros(vocab, dtype=torch.bool),
            generated_RV=zeros(vocab, dtype=torch.int32),
            is_masked_R=zeros(dtype=torch.bool),
            mask_RW=zeros(num_words(vocab), dtype=torch.int32),
        )


def num_words(vocab: int) -> int:
    """W, 32-bit words of a mask."""
    return -(-vocab // 32)


def adjust(logits_BV: torch.Tensor, adjustments: Adjustments, rows_B: torch.Tensor) -> torch.Tensor:
    """Adjusted logits, float32 [B, V]; of rows that ask for nothing, the logits as they are.

    Args:
        logits_BV: [B, V], any float dtype.
        adjustments: of R rows.
        rows_B: int64, the row of each place.
    """
    own, limit = adjustments, torch.finfo(logits_BV.dtype).max
    is_on_B = own.is_on_R[rows_B]
    rows_B = torch.where(is_on_B, rows_B, 0)  # padding has no row to look at
    raw_BV = logits_BV.float()
    c_BV = own.generated_RV[rows_B]
    x_BV = raw_BV + own.bias_RV[rows_B]
    r_B1 = own.repetition_R[rows_B, None]
    is_seen_BV = (c_BV > 0) | own.prompted_RV[rows_B]
    x_BV = torch.where(is_seen_BV, torch.where(x_BV > 0, x_BV / r_B1, x_BV * r_B1), x_BV)
    x_BV = x_BV - own.frequency_R[rows_B, None] * c_BV.float()
    x_BV = torch.where(c_BV > 0, x_BV - own.presence_R[rows_B, None], x_BV)
    x_BV = x_BV.clamp(-limit, limit)
    is_allowed_BV = unpack_mask(own.mask_RW[rows_B], logits_BV.shape[1])
    x_BV = torch.where(is_allowed_BV | ~own.is_masked_R[rows_B, None], x_BV, -torch.inf)
    x_BV = torch.where(torch.isfinite(raw_BV), x_BV, torch.nan)
    return torch.where(is_on_B[:, None], x_BV, raw_BV)


def unpack_mask(mask_RW: torch.Tensor, vocab: int) -> torch.Tensor:
    """bool [R, V] of the bits."""
    bit = torch.arange(32, device=mask_RW.device, dtype=torch.int32)
    return ((mask_RW[:, :, None] >> bit) & 1).flatten(1)[:, :vocab] != 0


def count(adjustments: Adjustments, rows_B: torch.Tensor, token_B: torch.Tensor) -> None:
    """Notes one more token of each row; only rows that ask for something are counted."""
    vocab = adjustments.generated_RV.shape[1]
    is_on_B = adjustments.is_on_R[rows_B]
    place_B = torch.where(is_on_B, rows_B * vocab + token_B, 0)
    adjustments.generated_RV.view(-1).index_add_(0, place_B, is_on_B.to(torch.int32))
