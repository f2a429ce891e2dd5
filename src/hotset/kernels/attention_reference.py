"""The specification of attention over cached keys and values, in plain torch.

    slot(p)    = block_table[b, (p // block_tokens) % N], token p % block_tokens of that block
    s_p        = scale * (q . k_p), then softcap * tanh(s_p / softcap) where there is a cap
    attended   = max(0, length - window) <= p < length
    out        = sum_p exp(s_p) v_p / (sum_p exp(s_p) + exp(sink))      the sink where there is one

In decode one query token a row, in prefill the newest tokens of one sequence. All sums in FP32
(FP64 for FP64 inputs), rounded once at the end. Slow on purpose, right by inspection; synchronises
with the host freely.
"""

from __future__ import annotations

import torch

from hotset.kernels.kv_fp8 import dequantise, quantise


def attended(length: int, window: int | None) -> range:
    """Positions that a row of `length` tokens attends to, the current one last."""
    return range(0 if window is None else max(0, length - window), length)


def gather_rows(pool: torch.Tensor, block_table_N: torch.Tensor, positions: range) -> torch.Tensor:
    """The pool's rows at `positions` of one sequence, [n, Hkv, D].

    Args:
        pool: [num_blocks, block_tokens, Hkv, D].
        block_table_N: block ids, [N]; logical block j is entry j % N.
    """
    block_tokens = pool.shape[1]
    p = torch.arange(positions.start, positions.stop, device=pool.device)
    blocks = block_table_N.long()[(p // block_tokens) % block_table_N.numel()]
    return pool[blocks, p % block_tokens]


def decode_attention(
    q_BQD: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_Q: torch.Tensor | None = None,
    exponents: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """[B, Hq, Dv] in the dtype of `q_BQD`; see `attention.AttentionKernels.decode`."""
    if exponents is not None:
        k_pool = dequantise(k_pool, exponents[0], q_BQD.dtype)
        v_pool = dequantise(v_pool, exponents[1], q_BQD.dtype)
    out = q_BQD.new_zeros(*q_BQD.shape[:2], v_pool.shape[-1])
    for row, length in enumerate(lengths_B.tolist()):
        if length > 0:
            positions = attended(length, window)
            k_PHD = gather_rows(k_pool, block_table_BN[row], positions)
            v_PHD = gather_rows(v_pool, block_table_BN[row], positions)
            out[row] = attend(
                q_BQD[row], k_PHD, v_PHD, scale=scale, softcap=softcap, sinks_Q=sinks_Q
            )
    return out


def decode_latents(
    q_BQR: torch.Tensor,
    q_BQD: torch.Tensor,
    latent_pool: torch.Tensor,
    rope_pool: torch.Tensor,
    block_table_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    sinks_Q: torch.Tensor | None = None,
    many: bool = False,
) -> torch.Tensor:
    """[B, Hq, R] in the dtype of `q_BQR`; see `attention.AttentionKernels.decode_latents`.

    One head of keys (latent and rotary part side by side) whose values are the latents.
    """
    out_BQR = torch.zeros_like(q_BQR)
    q_BQK = torch.cat((q_BQR, q_BQD), dim=-1)
    for row, length in enumerate(lengths_B.tolist()):
        if length > 0:
            latent_P1R, rope_P1D = (
                gather_rows(pool, block_table_BN[row], range(length))
                for pool in (latent_pool, rope_pool)
            )
            keys = torch.cat((latent_P1R, rope_P1D), dim=-1)
            out_BQR[row] = attend(q_BQK[row], keys, latent_P1R, scale=scale, sinks_Q=sinks_Q)
    return out_BQR


def index_scores(
    q_NHD: torch.Tensor,
    weights_NH: torch.Tensor,
    key_pool: torch.Tensor,
    table_RN: torch.Tensor,
    counts_N: torch.Tensor,
) -> torch.Tensor:
    """FP32 [N, P]; see `attention.AttentionKernels.index_scores`."""
    num_queries = len(q_NHD)
    out_NP = weights_NH.new_full((num_queries, table_RN.shape[1] * key_pool.shape[1]), -torch.inf)
    # Queries of one sequence together.
    each = num_queries if len(table_RN) == 1 else 1
    for row, table_N in enumerate(table_RN):
        of = slice(row * each, (row + 1) * each)
        most = int(counts_N[of].max())
        keys_PD = gather_rows(key_pool[:, :, None], table_N, range(most))[:, 0]
        products_NHP = torch.einsum("nhd,pd->nhp", q_NHD[of].float(), keys_PD.float())
        scores_NP = (weights_NH[of, :, None] * products_NHP.relu()).sum(1)
        unseen_NP = torch.arange(most, device=keys_PD.device) >= counts_N[of, None]
        out_NP[of, :most] = scores_NP.masked_fill(unseen_NP, -torch.inf)
    return out_NP


def attend(
    q_QD: torch.Tensor,
    k_PHD: torch.Tensor,
    v_PHD: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query token against P cached ones: [Hq, Dv] in the dtype of `q_QD`.

    Query heads h * group .. (h + 1) * group - 1 share KV head h.
    """
    dtype = torch.promote_types(q_QD.dtype, torch.float32)
    num_kv_heads = k_PHD.shape[1]
    q_HGD = q_QD.to(dtype).unflatten(0, (num_kv_heads, -1))
    s_HGP = scale * torch.einsum("hgd,phd->hgp", q_HGD, k_PHD.to(dtype))
    if softcap is not None:
        s_HGP = softcap * torch.tanh(s_HGP / softcap)
    if sinks_Q is not None:
        # One more position whose value is zero: it only adds to the denominator.
        sinks_HG1 = sinks_Q.to(dtype).view(num_kv_heads, -1, 1)
        s_HGP = torch.cat((s_HGP, sinks_HG1), dim=-1)
    p_HGP = torch.softmax(s_HGP, dim=-1)[..., : k_PHD.shape[0]]
    out_HGD = torch.einsum("hgp,phd->hgd", p_HGP, v_PHD.to(dtype))
    return out_HGD.flatten(0, 1).to(q_QD.dtype)


# Scores of a prompt that are held at a time, bytes.
SCORES_BYTES = 16 * 2**20


def prefill_attention(
    q_QTD: torch.Tensor,
    k_HPD: torch.Tensor,
    v_HPD: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, Hq, Dv] in the dtype of `q_QTD`; see `attention.AttentionKernels.prefill`.

    A block of queries at a time, so that no more than `SCORES_BYTES` of scores are held.
    """
    (num_heads, num_tokens, _), num_keys = q_QTD.shape, k_HPD.shape[1]
    out_TQD = q_QTD.new_empty(num_tokens, num_heads, v_HPD.shape[2])
    size = max(1, SCORES_BYTES // (4 * num_heads * num_keys))
    for first in range(0, num_tokens, size):
        block = slice(first, min(first + size, num_tokens))
        # Positions count from the first key.
        positions = range(num_keys - num_tokens + block.start, num_keys - num_tokens + block.stop)
        keys = slice(attended(positions[0] + 1, window).start, positions[-1] + 1)
        out_TQD[block] = _attend_block(
            q_QTD[:, block],
            k_HPD[:, keys],
            v_HPD[:, keys],
            positions=range(positions[0] - keys.start, positions[-1] + 1 - keys.start),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_Q=sinks_Q,
        )
    return out_TQD


def _attend_block(
    q_QTD: torch.Tensor,
    k_HPD: torch.Tensor,
    v_HPD: torch.Tensor,
    *,
    positions: range,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_Q: torch.Tensor | None,
) -> torch.Tensor:
    """Queries at `positions` of these keys, [T, Hq, Dv]."""
    dtype = torch.promote_types(q_QTD.dtype, torch.float32)
    num_kv_heads, num_keys, _ = k_HPD.shape
    q_HGTD = q_QTD.to(dtype).unflatten(0, (num_kv_heads, -1))
    s_HGTP = scale * torch.einsum("hgtd,hpd->hgtp", q_HGTD, k_HPD.to(dtype))
    if softcap is not None:
        s_HGTP = softcap * torch.tanh(s_HGTP / softcap)
    t = torch.arange(positions.start, positions.stop, device=q_QTD.device)[:, None]
    p = torch.arange(num_keys, device=q_QTD.device)
    seen_TP = p <= t
    if window is not None:
        seen_TP &= p > t - window
    s_HGTP = s_HGTP.masked_fill(~seen_TP, -torch.inf)
    if sinks_Q is not None:
        sinks = sinks_Q.to(dtype).view(num_kv_heads, -1, 1, 1)
        s_HGTP = torch.cat((s_HGTP, sinks.expand(*s_HGTP.shape[:3], 1)), dim=-1)
    p_HGTP = torch.softmax(s_HGTP, dim=-1)[..., :num_keys]
    out_HGTD = torch.einsum("hgtp,hpd->hgtd", p_HGTP, v_HPD.to(dtype))
    return out_HGTD.flatten(0, 1).transpose(0, 1).to(q_QTD.dtype)


def write_kv(
    k_BTHD: torch.Tensor,
    v_BTHD: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    exponents: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes T new tokens of every row into the pools; see `attention.AttentionKernels.write`."""
    num_new, block_tokens, num_blocks = k_BTHD.shape[1], k_pool.shape[1], block_table_BN.shape[1]
    for row, length in enumerate(lengths_B.tolist()):
        if length > 0:
            first = max(0, length - num_new, length - num_blocks * block_tokens)
            p = torch.arange(first, length, device=k_pool.device)
            blocks = block_table_BN[row].long()[(p // block_tokens) % num_blocks]
            new = p - (length - num_new)
            places = blocks, p % block_tokens
            if exponents is None:
                k_pool[places], v_pool[places] = k_BTHD[row, new], v_BTHD[row, new]
            else:
                k_pool[places], exponents[0][places] = quantise(k_BTHD[row, new])
                v_pool[places], exponents[1][places] = quantise(v_BTHD[row, new])
