"""Attention of a long prompt by torch's fused kernels, which keep no score: in parts, or whole.

Where torch prefers cuDNN (Hopper and newer) only that runs at the full rate of the device, and it
knows queries and keys of the same tokens, or queries that see every key: so new tokens meet
stretches of their past and themselves in turn, and the parts are merged (`attention_merge`). On an
H200, 4,096 tokens behind 61,440: 667 TFLOP/s, where FlashAttention 2's kernel has 349 and ours 414.
But cuDNN makes a plan for each shape that it has not met, which takes the host 70 ms. So shapes are
few: stretches are powers of two, new tokens are filled up to whole thousands, and what is not worth
a plan is left to our kernel. Elsewhere torch's own kernel takes the prompt whole. Knows torch's
operators and shapes; no windows, caps or sinks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

# FLOPs of a call from which cuDNN is worth its plans: 0.25 ms of our kernel, and a prompt has such
# calls in every layer. 4,096 tokens of 32 heads of 128 are 1.4e11.
LEAST_FLOPS = 1e11
# New tokens are filled up to a multiple of the one, stretches of the past are powers of two from
# the other on: a context of 128k has six of them.
NEW_TOKENS, PAST_TOKENS = 1024, 2048


def takes(q_QTD: torch.Tensor, k_HPD: torch.Tensor, v_HPD: torch.Tensor) -> bool:
    """Whether torch's kernels do these, by shapes alone: where it has none that keeps no score,
    torch would build the whole mask. FlashAttention is written for compute capability 8.0 on."""
    half = q_QTD.dtype in (torch.bfloat16, torch.float16)
    widths = v_HPD.shape[2] <= q_QTD.shape[2] <= 256
    if not (q_QTD.is_cuda and half and widths):
        return False
    if torch.cuda.get_device_capability(q_QTD.device) < (8, 0):
        return False
    return not _prefers_cudnn(q_QTD, k_HPD) or _is_worth_plans(q_QTD, k_HPD)


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
    attend = _in_parts if _prefers_cudnn(q_QTD, k_HPD) else _whole
    return attend(q_QTD, k_HPD, v_HPD, scale)[..., :value_dim]


def _prefers_cudnn(q_QTD: torch.Tensor, k_HPD: torch.Tensor) -> bool:
    """Whether torch itself would give cuDNN such queries and keys."""
    q, k = q_QTD[None], k_HPD[None]
    choice: int = torch._fused_sdp_choice(q, k, k, enable_gqa=True)
    return choice == SDPBackend.CUDNN_ATTENTION.value


def _is_worth_plans(q_QTD: torch.Tensor, k_HPD: torch.Tensor) -> bool:
    (num_heads, num_new, dim), num_past = q_QTD.shape, k_HPD.shape[1] - q_QTD.shape[1]
    flops = 4 * num_heads * dim * num_new * (num_past + num_new / 2)
    return flops >= LEAST_FLOPS and num_past % PAST_TOKENS == 0


def _whole(
    q_QTD: torch.Tensor, k_HPD: torch.Tensor, v_HPD: torch.Tensor, scale: float
) -> torch.Tensor:
    mask = causal_lower_right(q_QTD.shape[1], k_HPD.shape[1])
    out = functional.scaled_dot_product_attention(
        q_QTD[None], k_HPD[None], v_HPD[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _in_parts(
    q_QTD: torch.Tensor, k_HPD: torch.Tensor, v_HPD: torch.Tensor, scale: float
) -> torch.Tensor:
    """[T, Hq, D]: stretches of the past, the longest first, then the new tokens themselves; merged
    in this order, in FP32."""
    from hotset.kernels.attention_merge import merge

    num_new, num_past = q_QTD.shape[1], k_HPD.shape[1] - q_QTD.shape[1]
    q_QTD = _filled(q_QTD)
    k_own, v_own = (_filled(x[:, num_past:]) for x in (k_HPD, v_HPD))
    parts = [*_stretches(num_past), None]
    sums: torch.Tensor | None = None
    for keys in parts:
        if keys is None:
            out_TQD, logs_QT = _with_log_sums(q_QTD, k_own, v_own, scale, is_causal=True)
        else:
            seen_k, seen_v = k_HPD[:, keys], v_HPD[:, keys]
            out_TQD, logs_QT = _with_log_sums(q_QTD, seen_k, seen_v, scale, is_causal=False)
        if sums is None:
            sums, sums_QT = out_TQD, logs_QT
        else:
            dtype = q_QTD.dtype if keys is None else torch.float32
            sums = merge(sums, sums_QT, out_TQD, logs_QT, dtype=dtype)
    assert sums is not None
    return sums[:num_new]


def _filled(x_HTD: torch.Tensor) -> torch.Tensor:
    """Zeros up to whole thousands: behind all that is real, so no real query sees them. What is
    whole stays where it lies, torch would copy it."""
    missing = -x_HTD.shape[1] % NEW_TOKENS
    return functional.pad(x_HTD, (0, 0, 0, missing)) if missing else x_HTD


def _stretches(num_tokens: int) -> Iterator[slice]:
    """Powers of two that are so many tokens together, the largest first."""
    start = 0
    while start < num_tokens:
        size = 1 << (num_tokens - start).bit_length() - 1
        yield slice(start, start + size)
        start += size


def _with_log_sums(
    q_QTD: torch.Tensor, k_HPD: torch.Tensor, v_HPD: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """cuDNN's attention [T, Hq, D], and log sum exp of each query's scores, FP32 [Hq, T]."""
    out, log_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(q_QTD[None], k_HPD[None], v_HPD[None], None, True), is_causal=is_causal, scale=scale
    )
    return out[0].transpose(0, 1), log_sums.view(q_QTD.shape[:2])
