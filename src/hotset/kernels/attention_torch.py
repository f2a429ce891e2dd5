"""Attention of a prompt by torch's fused kernels, which keep no score: causal, or in two parts.

Only a kernel for queries and keys of the same tokens runs at the full rate of a Hopper GPU
(cuDNN's, 540 to 670 TFLOP/s on an H200); for the newest tokens of a longer text there is one of
FlashAttention 2's kind (347). So these go in two parts at the full rate: their past, of which every
query sees every key, and themselves; then the two are merged (`attention_merge`). Knows torch's
operators and shapes; no windows, caps or sinks.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

# Below either the second launch and the merge cost more than the faster kernel gains.
SPLIT_NEW_TOKENS, SPLIT_PAST_TOKENS = 256, 512


def takes(q_QTD: torch.Tensor, v_HPD: torch.Tensor) -> bool:
    """Whether torch's fused attention takes these: where it does not, torch would build the whole
    mask. It is written for compute capability 8.0 and newer."""
    half = q_QTD.dtype in (torch.bfloat16, torch.float16)
    widths = v_HPD.shape[2] <= q_QTD.shape[2] <= 256
    if not (q_QTD.is_cuda and half and widths):
        return False
    return torch.cuda.get_device_capability(q_QTD.device) >= (8, 0)


def prefill_attention(
    q_QTD: torch.Tensor, k_HPD: torch.Tensor, v_HPD: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """[T, Hq, Dv] in the dtype of `q_QTD`; see `attention.AttentionKernels.prefill`.

    Torch's kernels know one width. Narrower values get columns of zeros: 192 beside 128 is then as
    much work as in our kernel, whose tiles are powers of two (192 + 192 columns of a pair, or 256 +
    128).
    """
    value_dim, missing = v_HPD.shape[2], q_QTD.shape[2] - v_HPD.shape[2]
    v_HPD = functional.pad(v_HPD, (0, missing)) if missing else v_HPD
    q, k, v = q_QTD[None], k_HPD[None], v_HPD[None]
    num_past = k_HPD.shape[1] - q_QTD.shape[1]
    if _pays_in_two(q, k[:, :, :num_past], v[:, :, :num_past], scale):
        out_TQD = _in_two(q, k, v, scale)
    else:
        mask = causal_lower_right(q.shape[2], k.shape[2])
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
        )
        out_TQD = out[0].transpose(0, 1)
    return out_TQD[..., :value_dim]


def _pays_in_two(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> bool:
    """Whether new tokens meet their past, these keys and values, in a launch of its own.

    By shapes alone. Only where torch itself would have cuDNN do it: elsewhere both kernels are of
    one kind, and nothing is gained.
    """
    if q.shape[2] < SPLIT_NEW_TOKENS or k.shape[2] < SPLIT_PAST_TOKENS:
        return False
    choice: int = torch._fused_sdp_choice(q, k, v, scale=scale, enable_gqa=True)
    return choice == SDPBackend.CUDNN_ATTENTION.value


def _in_two(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[T, Hq, D]: the past, the new tokens themselves, and both merged."""
    from hotset.kernels.attention_merge import merge

    num_past = k.shape[2] - q.shape[2]
    parts = [
        _with_log_sums(q, k[:, :, keys], v[:, :, keys], scale, is_causal=is_causal)
        for keys, is_causal in ((slice(num_past), False), (slice(num_past, None), True))
    ]
    (past_TQD, past_QT), (own_TQD, own_QT) = parts
    return merge(past_TQD, past_QT, own_TQD, own_QT)


def _with_log_sums(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """cuDNN's attention [T, Hq, D], and log sum exp of each query's scores, FP32 [Hq, T]."""
    out, log_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, is_causal=is_causal, scale=scale
    )
    return out[0].transpose(0, 1), log_sums.view(q.shape[1:3])
