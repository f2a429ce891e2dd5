"""New tokens of one row of the pool: the whole prompt, or the next chunk of it.

A `PrefillStep` writes the new tokens and attends to them and to those of earlier chunks, gathered
from the pool. Layers are views that the library's `Cache` is made of (`kv_cache`), and that the
attention function gets in place of keys and values. Knows one row and its positions; no text.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from hotset.core.geometry import AttentionLayer
from hotset.experts.transfer import sent
from hotset.kernels.attention import AttentionKernels
from hotset.kernels.kv_fp8 import dequantise, rounded
from hotset.models.indexers import IndexKeys, PooledKeys, Selection
from hotset.models.latents import attend_absorbed, attend_expanded, by_head
from hotset.runtime.choosing import Chooser
from hotset.runtime.kv_pool import KVKind, KVPool, as_tokens
from hotset.runtime.state_rows import StateView

# Tokens that attend to what was chosen for them at a time: with 64 heads of 512 columns their sums
# in FP32 take 32 MiB.
CHOSEN_TOKENS = 256


class PrefillStep:
    """New tokens of one row: the whole prompt, or the next chunk of it.

    Args:
        pool: where they go.
        row: an open row; the tokens follow those that it has.
        num_tokens: how many.
        kernels: attention kernels.
        ahead: tokens of chunks that run before this one and are not committed yet.

    Raises:
        RequestError: the row cannot become so long; nothing has changed then.
    """

    def __init__(
        self, pool: KVPool, row: int, num_tokens: int, *, kernels: AttentionKernels, ahead: int = 0
    ) -> None:
        self.pool, self.row, self.num_tokens, self.kernels = pool, row, num_tokens, kernels
        self.start = pool.lengths[row] + ahead
        pool.reserve(row, self.start + num_tokens)
        self.length_1 = sent(np.array([self.start + num_tokens], dtype=np.int32), pool.device)
        self.kinds = {window: _PrefillKind(self, kind) for window, kind in pool.kinds.items()}

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 [1, T] on the device, for the model."""
        stop = self.start + self.num_tokens
        return torch.arange(self.start, stop, device=self.pool.device)[None]

    def attention(self, layer: AttentionLayer) -> CacheLayerMixin:
        return _PrefillLayer(self, layer)

    def state(self, index: int) -> StateView:
        # What an earlier chunk leaves in the row is there when this one comes to the layer.
        return StateView(self.pool.states.row(index, self.row), begun=self.start > 0)

    def both(self, layer: AttentionLayer) -> CacheLayerMixin:
        return _PrefillBoth(self, layer)

    def commit(self) -> None:
        """The forward has run: the row is longer now. If it has not, close the row: a ring may
        have lost what the new tokens would have seen."""
        self.pool.grow(self.row, self.num_tokens)


class _PrefillKind:
    """Block table of the row, and where the tokens lie that the new ones see of it."""

    def __init__(self, step: PrefillStep, kind: KVKind) -> None:
        table_1N = kind.table_RN[step.row : step.row + 1]
        device, block_tokens = step.pool.device, step.pool.block_tokens
        self.table_1N = sent(table_1N, device)
        self.is_ring = kind.window is not None
        # The first new token sees window - 1 earlier ones.
        self.num_seen = step.start if kind.window is None else min(step.start, kind.window - 1)
        first = step.start - self.num_seen
        stop = step.start if self.is_ring else step.start + step.num_tokens
        blocks = np.arange(first // block_tokens, -(-stop // block_tokens))
        ids = table_1N[0, blocks % kind.row_blocks]
        self.blocks = sent(ids.astype(np.int64), device)
        skip = first % block_tokens
        self.gathered = slice(skip, skip + stop - first)

    def gather(
        self, pool: torch.Tensor, exponents: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """[Hkv, P, D], a strided view of a copy: the tokens that the new ones see of a ring before
        they are written there, or these and the new ones.

        Args:
            exponents: of a pool of codes, which become numbers of `dtype`.
        """
        kept = pool[self.blocks].flatten(0, 1)[self.gathered]
        if exponents is not None:
            powers = exponents[self.blocks].flatten(0, 1)[self.gathered]
            kept = dequantise(kept, powers, dtype)
        return kept.transpose(0, 1)


class _PrefillLayer(CacheLayerMixin):
    """Also the `KVView` of its layer."""

    def __init__(self, step: PrefillStep, layer: AttentionLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step, self._kind, self._window = step, step.kinds[layer.window], layer.window
        self._pools = step.pool.pools[layer.index]
        self._exponents = step.pool.exponents[layer.index]
        self.keeps_latents = layer.latent is not None
        assert layer.window is None or not self.keeps_latents
        # Stock code that makes a mask of what was chosen asks for it, and hands it to us.
        self.shape = (0, 0, 0, 0)
        self._attended: tuple[torch.Tensor, torch.Tensor] | None = None
        self._latent = layer.latent
        index = step.pool.indices.get(layer.index)
        self._chooser = None if index is None else Chooser(index, step.kernels)
        self.is_sliding = layer.window is not None
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Writes [1, Hkv, T, D]; returns itself twice, for the attention function."""
        assert key_states.shape[0] == 1 and key_states.shape[2] == self._step.num_tokens
        keys, values = key_states[0], value_states[0]
        if self._exponents is not None:
            # Every query sees what decode steps will see, its own chunk's as well.
            keys, values = rounded(keys), rounded(values)
        if self._kind.num_seen and self._kind.is_ring:
            # Read first: the new tokens may take the place of what they see.
            past_keys, past_values = self._gathered(keys.dtype)
            keys, values = torch.cat((past_keys, keys), dim=1), torch.cat((past_values, values), 1)
        self._step.kernels.write(
            key_states.transpose(1, 2),
            value_states.transpose(1, 2),
            *self._pools,
            self._kind.table_1N,
            self._step.length_1,
            exponents=self._exponents,
        )
        if self._kind.num_seen and not self._kind.is_ring:
            # One copy of all: what an earlier chunk left and this one, joined, would be two.
            keys, values = self._gathered(keys.dtype)
        self._attended = keys, values
        return self, self

    def _gathered(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        k_powers, v_powers = self._exponents or (None, None)
        k_pool, v_pool = self._pools
        gather = self._kind.gather
        return gather(k_pool, k_powers, dtype), gather(v_pool, v_powers, dtype)

    def attend(
        self,
        q_BQTD: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks_Q: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self._attended is not None
        (keys, values), self._attended = self._attended, None
        return self._step.kernels.prefill(
            q_BQTD[0],
            keys,
            values,
            scale=scale,
            window=self._window,
            softcap=softcap,
            sinks_Q=sinks_Q,
        )[None]

    def update_indexer(self, new: torch.Tensor | PooledKeys) -> IndexKeys:
        """Writes [1, T, D], or what pooled keys are made of."""
        assert self._chooser is not None
        step, table_1N = self._step, self._kind.table_1N
        self._chooser.index.extend(new, step.row, table_1N[0], step.start)

        def choose(q_BTHD: torch.Tensor, weights_BTH: torch.Tensor, top_k: int) -> Selection:
            assert self._chooser is not None and top_k == self._chooser.indexer.top_k
            return self._chooser.of_prompt(q_BTHD, weights_BTH, table_1N, step.start)

        return IndexKeys(choose)

    def attend_latents(
        self,
        q_BQTD: torch.Tensor,
        weight: torch.Tensor,
        *,
        scale: float,
        sinks_Q: torch.Tensor | None,
        selection: Selection | None,
    ) -> torch.Tensor:
        assert self._attended is not None
        (latents_1PR, rope_1PD), self._attended = self._attended, None
        weight_QER, q_QTD = by_head(weight, q_BQTD.shape[1]), q_BQTD[0]
        num_tokens, num_dense, parts = q_QTD.shape[1], q_QTD.shape[1], []
        if selection is not None and selection.slots_NK is not None:
            num_dense = selection.num_dense
            attend = partial(self._attend_chosen, scale=scale, sinks_Q=sinks_Q)
            parts = attend(q_QTD[:, num_dense:], weight_QER, selection)
        if num_dense:
            seen = latents_1PR.shape[1] - num_tokens + num_dense
            dense = attend_expanded(
                *(q_QTD[:, :num_dense], latents_1PR[0, :seen], rope_1PD[0, :seen], weight_QER),
                kernels=self._step.kernels,
                scale=scale,
                sinks_Q=sinks_Q,
            )
            parts = [dense, *parts]
        return (torch.cat(parts) if len(parts) > 1 else parts[0])[None]

    def _attend_chosen(
        self,
        q_QTD: torch.Tensor,
        weight_QER: torch.Tensor,
        selection: Selection,
        *,
        scale: float,
        sinks_Q: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """[T, Hq, V] in parts: each token to what was chosen for it, in latent space, where what
        is chosen for one need not be expanded for it alone."""
        assert self._latent is not None and selection.slots_NK is not None
        assert selection.counts_N is not None
        pools, parts = [as_tokens(pool) for pool in self._pools], []
        for first in range(0, q_QTD.shape[1], CHOSEN_TOKENS):
            of = slice(first, first + CHOSEN_TOKENS)
            rows = selection.slots_NK[of], selection.counts_N[of]

            def attend(q_BQR: torch.Tensor, q_BQD: torch.Tensor, rows: Any = rows) -> torch.Tensor:
                return self._step.kernels.decode_latents(
                    *(q_BQR, q_BQD, *pools, *rows), scale=scale, sinks_Q=sinks_Q, many=True
                )

            q_TQD = q_QTD[:, of].transpose(0, 1)
            parts.append(attend_absorbed(q_TQD, weight_QER, self._latent.rope_dim, attend))
        return parts

    def get_seq_length(self) -> int:
        return self._step.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        num_seen = self._kind.num_seen
        return num_seen + query_length, self._step.start - num_seen

    def get_max_length(self) -> int:
        return self._step.pool.context_tokens

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the pool is there before the first forward."""


class _PrefillBoth(_PrefillLayer, StateView):
    """A layer that keeps a state beside keys and values."""

    def __init__(self, step: PrefillStep, layer: AttentionLayer) -> None:
        StateView.__init__(self, step.pool.states.row(layer.index, step.row), begun=step.start > 0)
        _PrefillLayer.__init__(self, step, layer)
