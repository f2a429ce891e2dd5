"""The specification of what a step tells the host of its draws, and of the books it keeps.

    logprob_i = x_i - log(sum_j exp(x_j))        of the model's own logits x, FP32

of the token that was drawn and of the `MAX_TOP_LOGPROBS` most likely ones, in rows that ask for it.
All in one int64 row a place, as one copy brings it to the host:

    token, finite, logprob, top ids ..., top logprobs ...

Logprobs are the bits of FP32 numbers; of rows that do not ask, these columns mean nothing. Where
the vocabulary has fewer than `MAX_TOP_LOGPROBS` tokens, the others have id -1.

Letters: B places of a step, R rows whose state is kept, V vocabulary, N = `MAX_TOP_LOGPROBS`.
"""

from __future__ import annotations

import torch

from hotset.core.request import MAX_TOP_LOGPROBS

TOKEN, FINITE, LOGPROB, TOP_IDS = 0, 1, 2, 3
TOP_LOGPROBS = TOP_IDS + MAX_TOP_LOGPROBS
REPORT_WIDTH = TOP_LOGPROBS + MAX_TOP_LOGPROBS


def report(
    logits_BV: torch.Tensor,
    token_B: torch.Tensor,
    finite_B: torch.Tensor,
    *,
    wants_logprobs_R: torch.Tensor,
    rows_B: torch.Tensor,
) -> torch.Tensor:
    """The report, int64 [B, `REPORT_WIDTH`].

    Args:
        logits_BV: as the model gave them, any float dtype.
        token_B, finite_B: what was drawn, int64 and bool.
        wants_logprobs_R: bool, of each row.
        rows_B: int64, the row of each place.
    """
    out_BW = torch.zeros((len(token_B), REPORT_WIDTH), dtype=torch.int64, device=logits_BV.device)
    out_BW[:, TOKEN], out_BW[:, FINITE] = token_B, finite_B.to(torch.int64)
    wanted_B = wants_logprobs_R[rows_B]
    if not wanted_B.is_cuda and not bool(wanted_B.any()):  # asking costs nothing here
        return out_BW
    x_BV = logits_BV.float()
    norm_B1 = torch.logsumexp(x_BV, 1, keepdim=True)
    out_BW[:, LOGPROB : LOGPROB + 1] = as_bits(x_BV.gather(1, token_B[:, None]) - norm_B1)
    top_x_BN, top_ids_BN = top(x_BV)
    num = top_ids_BN.shape[1]
    out_BW[:, TOP_IDS:TOP_LOGPROBS] = -1
    out_BW[:, TOP_IDS : TOP_IDS + num] = top_ids_BN
    out_BW[:, TOP_LOGPROBS : TOP_LOGPROBS + num] = as_bits(top_x_BN - norm_B1)
    return out_BW


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of FP32 numbers, int64."""
    return x.contiguous().view(torch.int32).to(torch.int64)


def top(x_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The N largest of each row, and their ids; the lower id first among equals.

    One integer for each token, whose order is that of (x, -id): no two are equal.
    """
    bits_BV = torch.where(x_BV == 0, 0.0, x_BV).view(torch.int32)
    order_BV = torch.where(bits_BV < 0, bits_BV ^ 0x7FFFFFFF, bits_BV).to(torch.int64)
    ids_V = torch.arange(x_BV.shape[1], device=x_BV.device)
    packed_BV = (order_BV << 32) | (0xFFFFFFFF - ids_V)
    best_BN = packed_BV.topk(min(MAX_TOP_LOGPROBS, x_BV.shape[1]), dim=1).values
    ids_BN = 0xFFFFFFFF - (best_BN & 0xFFFFFFFF)
    return x_BV.gather(1, ids_BN), ids_BN
