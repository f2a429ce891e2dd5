"""The specification of decode attention over a pool of KV blocks, in plain torch.

    slot(p)    = block_table[b, (p // block_tokens) % N], token p % block_tokens of that block
    s_p        = scale * (q . k_p), then softcap * tanh(s_p / softcap) where there is a cap
    attended   = max(0, length - window) <= p < length
    out        = sum_p exp(s_p) v_p / (sum_p exp(s_p) + exp(sink))      the sink where there is one

One query token a row, all sums in FP32 (FP64 for FP64 inputs), rounded once at the end. Slow on
purpose, right by inspection; synchronises with the host freely.
"""

from __future__ import annotations

import torch


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
) -> torch.Tensor:
    """[B, Hq, Dv] in the dtype of `q_BQD`; see `attention.AttentionKernels.decode`."""
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


def write_kv(
    k_BTHD: torch.Tensor,
    v_BTHD: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table_BN: torch.Tensor,
    lengths_B: torch.Tensor,
) -> None:
    """Writes T new tokens of every row into the pools; see `attention.AttentionKernels.write`."""
    num_new, block_tokens, num_blocks = k_BTHD.shape[1], k_pool.shape[1], block_table_BN.shape[1]
    for row, length in enumerate(lengths_B.tolist()):
        if length > 0:
            first = max(0, length - num_new, length - num_blocks * block_tokens)
            p = torch.arange(first, length, device=k_pool.device)
            blocks = block_table_BN[row].long()[(p // block_tokens) % num_blocks]
            new = p - (length - num_new)
            k_pool[blocks, p % block_tokens] = k_BTHD[row, new]
            v_pool[blocks, p % block_tokens] = v_BTHD[row, new]
