"""Attention whose cache holds latents (MLA): expanded to heads for prompts, never for decoding.

    [k_nope | v] = W c        W [Hq, N + V, R], c [R] the latent of a position
    key          = [k_nope | r]       r [D] its rotary part, the same for all heads
    q . key      = (q_nope W_k) . c + q_rope . r
    sum_p w_p v  = W_v sum_p w_p c_p

A decode step multiplies each query by W_k and each sum of latents by W_v, and so reads what is
cached as it is. A prompt has enough queries that expanding costs less than wider scores. Knows
products of one layer; nothing of pools, rows or modules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hotset.core.units import MIB
from hotset.kernels.attention import AttentionKernels

# Keys and values of a prompt that are expanded at a time, as many heads as that is: enough for a
# launch to fill a large card, whatever the context.
EXPANDED_BYTES = 512 * MIB

# (queries in latent space [B, Hq, R], rotary parts [B, Hq, D]) -> weighted sums of latents
# [B, Hq, R]
AttendLatents = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_head(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """W as the library keeps it, [Hq * (N + V), R], as [Hq, N + V, R]."""
    return weight.view(num_heads, -1, weight.shape[1])


def attend_absorbed(
    q_BQK: torch.Tensor, weight_QER: torch.Tensor, rope_dim: int, attend: AttendLatents
) -> torch.Tensor:
    """One query token a row, in latent space: [B, Hq, V].

    Args:
        q_BQK: [B, Hq, N + D], the rotary part last.
        weight_QER: W, [Hq, N + V, R].
        rope_dim: D.
        attend: to what is cached of each row.
    """
    nope_dim = q_BQK.shape[2] - rope_dim
    q_BQN, q_BQD = q_BQK.split([nope_dim, rope_dim], dim=2)
    # Products of each head of its own, [Hq, B, ..], without a copy of W.
    q_BQR = torch.bmm(q_BQN.transpose(0, 1), weight_QER[:, :nope_dim]).transpose(0, 1)
    out_QBR = attend(q_BQR, q_BQD).transpose(0, 1)
    return torch.bmm(out_QBR, weight_QER[:, nope_dim:].transpose(1, 2)).transpose(0, 1)


def attend_expanded(
    q_QTK: torch.Tensor,
    latents_PR: torch.Tensor,
    rope_PD: torch.Tensor,
    weight_QER: torch.Tensor,
    *,
    kernels: AttentionKernels,
    scale: float,
    sinks_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """The T newest of P tokens of one sequence, with keys and values of a few heads at a time.

    Args:
        q_QTK: [Hq, T, N + D].
        latents_PR, rope_PD: of all P tokens.
        weight_QER: W, [Hq, N + V, R].
        sinks_Q: as in `AttentionKernels.prefill`.

    Returns:
        [T, Hq, V]; its bits depend on shapes alone.
    """
    num_heads, _, key_dim = q_QTK.shape
    num_tokens, rope_dim = rope_PD.shape
    value_dim = weight_QER.shape[1] - (key_dim - rope_dim)
    token_bytes = expanded_elements(key_dim, value_dim) * q_QTK.element_size()
    at_a_time = max(1, EXPANDED_BYTES // (token_bytes * num_tokens))
    if at_a_time >= num_heads:
        keys, values = expand(latents_PR, rope_PD, weight_QER, value_dim=value_dim)
        return kernels.prefill(q_QTK, keys, values, scale=scale, sinks_Q=sinks_Q)
    out_TQV = q_QTK.new_empty(q_QTK.shape[1], num_heads, value_dim)
    for first in range(0, num_heads, at_a_time):
        heads = slice(first, first + at_a_time)
        keys, values = expand(latents_PR, rope_PD, weight_QER[heads], value_dim=value_dim)
        sinks = None if sinks_Q is None else sinks_Q[heads]
        out_TQV[:, heads] = kernels.prefill(q_QTK[heads], keys, values, scale=scale, sinks_Q=sinks)
        del keys, values  # before the next ones are made
    return out_TQV


def expand(
    latents_PR: torch.Tensor, rope_PD: torch.Tensor, weight_QER: torch.Tensor, *, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [Hq, P, N + D] and values [Hq, P, V] of some heads; any strides."""
    num_heads, width, _ = weight_QER.shape
    both_PQE = (latents_PR @ weight_QER.flatten(0, 1).T).unflatten(1, (num_heads, width))
    nope_PQN, values_PQV = both_PQE.split([width - value_dim, value_dim], dim=2)
    rope_PQD = rope_PD[:, None].expand(-1, num_heads, -1)
    keys_PQK = torch.cat((nope_PQN, rope_PQD), dim=2)
    return keys_PQK.transpose(0, 1), values_PQV.transpose(0, 1)


def expanded_elements(key_dim: int, value_dim: int) -> int:
    """Elements that one token takes in each head at most: the product with W, keys, and values
    once more, as wide as keys, for kernels that take one width only."""
    return 3 * key_dim + value_dim
