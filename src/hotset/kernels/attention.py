"""Attention over the KV pool: the interface, its rules, and which implementation runs.

Layout of one layer's pools: [num_blocks, block_tokens, Hkv, D], contiguous, keys and values with a
D of their own. Logical block j of a row is entry j % N of its block table, so a table shorter than
the sequence is a ring of the last N blocks. Knows shapes, not sequences or who owns a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hotset.kernels import attention_reference as reference
from hotset.kernels import attention_torch


@dataclass(frozen=True)
class AttentionKernels:
    """The attention ops of one layer. All tensors are on one device.

    Attributes:
        name: `reference` (plain torch; waits for the device) or `triton` (never waits, so a step
            can be captured in a CUDA graph); as in `dispatch.Kernels.name`.
    """

    name: str

    def decode(
        self,
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
        """Attends with one query token a row to what the pools hold of that row.

        Args:
            q_BQD: [B, Hq, Dk], Hq a multiple of Hkv; query heads h * group .. share KV head h.
            k_pool: [num_blocks, block_tokens, Hkv, Dk], dtype of `q_BQD`.
            v_pool: [num_blocks, block_tokens, Hkv, Dv].
            block_table_BN: int32 [B, N].
            lengths_B: int32 [B], tokens attended including the current one. Rows of length 0
                are padding: their output is zero and nothing of them is read.
            scale: of q . k.
            window: only the last `window` positions are attended; `None` attends to all. The
                table must hold them: the whole row, or `ring_blocks` of the window.
            softcap: scores become softcap * tanh(score / softcap).
            sinks_Q: [Hq], one more logit of each head in the denominator.
            exponents: of pools that hold E4M3 codes (uint8), of keys and of values: uint8
                [num_blocks, block_tokens, Hkv]; see `kv_fp8`.

        Returns:
            [B, Hq, Dv] in the dtype of `q_BQD`, contiguous. Its bits depend on the row's own
            tokens and on shapes, not on N, the place of blocks, or the other rows.
        """
        batch, num_heads, key_dim = q_BQD.shape
        assert k_pool.shape[:3] == v_pool.shape[:3] and k_pool.shape[3] == key_dim
        assert num_heads % k_pool.shape[2] == 0, (num_heads, k_pool.shape)
        _check_kept(q_BQD.dtype, k_pool, v_pool, exponents)
        assert block_table_BN.shape[0] == batch and lengths_B.shape == (batch,)
        assert sinks_Q is None or sinks_Q.shape == (num_heads,)
        _check_pool(k_pool, v_pool, block_table_BN, lengths_B)
        if self.name == "reference":
            decode_attention = reference.decode_attention
        else:
            from hotset.kernels.attention_decode import decode_attention
        return decode_attention(
            _whole_heads(q_BQD),
            k_pool,
            v_pool,
            block_table_BN,
            lengths_B,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_Q=sinks_Q,
            exponents=exponents,
        )

    def decode_latents(
        self,
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
        """Attends with one query token a row in latent space: what is cached of a position is one
        latent and one rotary key for all heads, and the latent is its value too.

        Args:
            q_BQR: [B, Hq, R], queries in latent space.
            q_BQD: [B, Hq, D], their rotary parts; dtype of `q_BQR`.
            latent_pool: [num_blocks, block_tokens, 1, R], dtype of `q_BQR`.
            rope_pool: [num_blocks, block_tokens, 1, D].
            block_table_BN, lengths_B: as in `decode`; the table holds whole rows.
            scale: of q . k, both parts added.
            sinks_Q: as in `decode`.
            many: so many rows that a row need not be cut along its context: the tokens of a prompt.
                Bits are others then.

        Returns:
            [B, Hq, R], weighted sums of latents, contiguous; bits as in `decode`.
        """
        assert latent_pool.shape[2] == rope_pool.shape[2] == 1
        assert latent_pool.shape[:2] == rope_pool.shape[:2]
        assert q_BQR.shape == (len(lengths_B), q_BQD.shape[1], latent_pool.shape[3])
        assert q_BQD.shape[::2] == (len(lengths_B), rope_pool.shape[3])
        assert q_BQR.dtype == q_BQD.dtype == latent_pool.dtype == rope_pool.dtype
        assert len(block_table_BN) == len(lengths_B)
        assert sinks_Q is None or sinks_Q.shape == (q_BQR.shape[1],)
        _check_pool(latent_pool, rope_pool, block_table_BN, lengths_B)
        if self.name == "reference":
            decode_latents = reference.decode_latents
        else:
            from hotset.kernels.latent_decode import decode_latents
        return decode_latents(
            _whole_heads(q_BQR),
            _whole_heads(q_BQD),
            latent_pool,
            rope_pool,
            block_table_BN,
            lengths_B,
            scale=scale,
            sinks_Q=sinks_Q,
            many=many,
        )

    def index_scores(
        self,
        q_NHD: torch.Tensor,
        weights_NH: torch.Tensor,
        key_pool: torch.Tensor,
        table_RN: torch.Tensor,
        counts_N: torch.Tensor,
    ) -> torch.Tensor:
        """How much each query wants each candidate: sum_h w_h relu(q_h . k), the indexer of
        DeepSeek Sparse Attention (`transformers`' `DeepseekV32Indexer`).

        Args:
            q_NHD: [N, H, D].
            weights_NH: FP32 [N, H], contiguous.
            key_pool: [num_blocks, block_keys, D], dtype of `q_NHD`.
            table_RN: int32 block ids, a row for each query or one row for all.
            counts_N: int32 [N], candidates of each query; 0 for padding.

        Returns:
            FP32 [N, P], P = all that the table has room for; -inf behind a query's candidates.
        """
        assert q_NHD.shape[:2] == weights_NH.shape and q_NHD.shape[2] == key_pool.shape[2]
        assert q_NHD.dtype == key_pool.dtype and weights_NH.dtype == torch.float32
        assert len(table_RN) in (1, len(q_NHD)) and counts_N.shape == q_NHD.shape[:1]
        assert key_pool.is_contiguous() and table_RN.stride(1) == 1 and weights_NH.is_contiguous()
        assert table_RN.dtype == counts_N.dtype == torch.int32 and counts_N.is_contiguous()
        if self.name == "reference":
            index_scores = reference.index_scores
        else:
            from hotset.kernels.index_scores import index_scores
        return index_scores(_whole_heads(q_NHD), weights_NH, key_pool, table_RN, counts_N)

    def prefill(
        self,
        q_QTD: torch.Tensor,
        k_HPD: torch.Tensor,
        v_HPD: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_Q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The T newest of P tokens of one sequence attend to themselves and to all before them.

        Memory grows with T and P, never with T * P.

        Args:
            q_QTD: [Hq, T, Dk], Hq a multiple of Hkv; query heads h * group .. share KV head h.
            k_HPD: [Hkv, P, Dk], dtype of `q_QTD`, P at least T; the queries are its last T tokens.
            v_HPD: [Hkv, P, Dv].
            scale, window, softcap, sinks_Q: as in `decode`. With a window the first of the P may
                lie before what any query sees.

        Returns:
            [T, Hq, Dv] in the dtype of `q_QTD`, any strides. Its bits depend on shapes alone.
        """
        assert k_HPD.shape[:2] == v_HPD.shape[:2] and k_HPD.shape[2] == q_QTD.shape[2]
        assert q_QTD.shape[0] % k_HPD.shape[0] == 0 and q_QTD.shape[1] <= k_HPD.shape[1]
        assert q_QTD.dtype == k_HPD.dtype == v_HPD.dtype
        assert sinks_Q is None or sinks_Q.shape == (q_QTD.shape[0],)
        is_plain = softcap is None and sinks_Q is None
        if window is not None and window >= k_HPD.shape[1]:
            window = None
        if self.name == "reference":
            attend = reference.prefill_attention
        elif is_plain and window is None and attention_torch.takes(q_QTD, k_HPD, v_HPD):
            return attention_torch.prefill_attention(q_QTD, k_HPD, v_HPD, scale=scale)
        else:
            from hotset.kernels.attention_prefill import prefill_attention as attend
        tensors = (_whole_heads(x) for x in (q_QTD, k_HPD, v_HPD))
        return attend(*tensors, scale=scale, window=window, softcap=softcap, sinks_Q=sinks_Q)

    def write(
        self,
        k_BTHD: torch.Tensor,
        v_BTHD: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        block_table_BN: torch.Tensor,
        lengths_B: torch.Tensor,
        *,
        exponents: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Writes the T newest tokens of every row into the pools, in place.

        Args:
            k_BTHD: [B, T, Hkv, Dk], dtype of the pools.
            v_BTHD: [B, T, Hkv, Dv].
            lengths_B: int32 [B], tokens including the T new ones, which are positions
                length - T .. length - 1. Rows of length 0 write nothing. Of more new tokens
                than the table holds only the last are written.
            exponents: as for `decode`, written too.
        """
        assert k_BTHD.shape[2:] == k_pool.shape[2:] and v_BTHD.shape[2:] == v_pool.shape[2:]
        assert k_BTHD.shape[:2] == v_BTHD.shape[:2]
        assert k_BTHD.dtype == v_BTHD.dtype
        _check_kept(k_BTHD.dtype, k_pool, v_pool, exponents)
        assert len(k_BTHD) == len(block_table_BN) == len(lengths_B)
        _check_pool(k_pool, v_pool, block_table_BN, lengths_B)
        if self.name == "reference":
            write_kv = reference.write_kv
        else:
            from hotset.kernels.kv_write import write_kv
        write_kv(
            *(_whole_heads(k_BTHD), _whole_heads(v_BTHD), k_pool, v_pool),
            *(block_table_BN, lengths_B),
            exponents=exponents,
        )


def ring_blocks(window: int, block_tokens: int) -> int:
    """Blocks of a ring that holds the last `window` positions wherever they begin in a block."""
    return -(-(window - 1) // block_tokens) + 1


def _whole_heads(x: torch.Tensor) -> torch.Tensor:
    """The kernels take any strides but the last."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_pool(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table_BN: torch.Tensor,
    lengths_B: torch.Tensor,
) -> None:
    assert k_pool.is_contiguous() and v_pool.is_contiguous()
    assert block_table_BN.dtype == torch.int32 and block_table_BN.is_contiguous()
    assert lengths_B.dtype == torch.int32 and lengths_B.is_contiguous()


def _check_kept(
    dtype: torch.dtype,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    exponents: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    kept = dtype if exponents is None else torch.uint8
    assert k_pool.dtype == v_pool.dtype == kept, (k_pool.dtype, v_pool.dtype, kept)
    for powers in exponents or ():
        assert powers.dtype == torch.uint8 and powers.is_contiguous()
        assert powers.shape == k_pool.shape[:3]
