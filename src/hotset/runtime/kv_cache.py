"""The pool as the library's `Cache`, for a step: prefill of one row, or decode of many.

What is done is chosen by the step object, never by data. A `DecodeBatch` writes one token a row and
attends to the pool itself; prompts are `kv_prefill`'s. Either way the attention function gets the
layer itself in place of keys and values (`models.attention`), and there is no mask. A layer that
carries a state finds it where the library would keep it (`state_rows`). Knows rows and positions,
nothing of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from hotset.core.geometry import AttentionLayer
from hotset.experts.transfer import send
from hotset.kernels.attention import AttentionKernels
from hotset.models.indexers import IndexKeys, PooledKeys, Selection
from hotset.models.latents import attend_absorbed, by_head
from hotset.runtime.choosing import Chooser
from hotset.runtime.kv_pool import KVPool, as_tokens
from hotset.runtime.state_rows import StateView


class Step(Protocol):
    """What a `KVCache` is made for."""

    pool: KVPool

    def attention(self, layer: AttentionLayer) -> CacheLayerMixin:
        """The cache's view of a layer's keys and values during this step."""

    def state(self, index: int) -> StateView:
        """The cache's view of a layer's state."""

    def both(self, layer: AttentionLayer) -> CacheLayerMixin:
        """Both of them, of a layer that keeps both."""


class KVCache(Cache):
    """The library's view of a step. Good for one `kv_prefill.PrefillStep`, or for the life of a
    `DecodeBatch`; what the library may do to a cache besides running forwards is refused."""

    def __init__(self, step: Step) -> None:
        last = max([*step.pool.layers, *step.pool.states.layers])
        super().__init__([_view(step, index) for index in range(last + 1)])

    # What compiles a model's layers stops here (`models.attention`).
    update = torch.compiler.disable(Cache.update)
    get_conv_state = torch.compiler.disable(Cache.get_conv_state)
    get_recurrent_state = torch.compiler.disable(Cache.get_recurrent_state)
    update_conv_state = torch.compiler.disable(Cache.update_conv_state)
    update_recurrent_state = torch.compiler.disable(Cache.update_recurrent_state)
    update_indexer = torch.compiler.disable(Cache.update_indexer)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Of a mask that nobody looks into (`models.attention`)."""
        return 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is taken back: `crop` is refused."""
        return False


def _view(step: Step, index: int) -> CacheLayerMixin | StateView | DummyLayer:
    layer, has_state = step.pool.layers.get(index), index in step.pool.states.layers
    if layer is None:
        return step.state(index) if has_state else DummyLayer()
    return step.both(layer) if has_state else step.attention(layer)


class DecodeBatch:
    """One new token for each of up to B rows, over and over. Its tensors never move, so that a
    captured step can be replayed; rows and lengths are data in them.

    A step is `begin_step` on the host, then on the device `advance`, the model's forward and
    `put_back`.

    Args:
        pool: whose rows are decoded.
        size: B.
        kernels: attention kernels.

    Attributes:
        rows: the pool's row in each place, `None` for padding.
        rows_B: int64, the same on the device; `pool.num_rows` for padding.
        lengths_B: int32, tokens of each row with the current one; 0 for padding.
        position_ids_B1: int64, of the current token; 0 for padding.
        tables: window -> block table, int32 [B, N].
    """

    def __init__(self, pool: KVPool, size: int, *, kernels: AttentionKernels) -> None:
        self.pool, self.size, self.kernels = pool, size, kernels
        self.rows: list[int | None] = [None] * size
        self.rows_B = torch.full((size,), pool.num_rows, dtype=torch.int64, device=pool.device)
        self.lengths_B = torch.zeros(size, dtype=torch.int32, device=pool.device)
        self.position_ids_B1 = torch.zeros(size, 1, dtype=torch.int64, device=pool.device)
        self.tables = {
            window: torch.zeros(size, kind.row_blocks, dtype=torch.int32, device=pool.device)
            for window, kind in pool.kinds.items()
        }
        self._active_B = torch.zeros_like(self.lengths_B)
        # Blocks of each row that the device knows of, per kind.
        self._known = {window: [0] * size for window in self.tables}

    def attention(self, layer: AttentionLayer) -> CacheLayerMixin:
        return _DecodeLayer(self, layer)

    def state(self, index: int) -> StateView:
        return StateView(self.pool.states.places(index, self.size), begun=True)

    def both(self, layer: AttentionLayer) -> CacheLayerMixin:
        return _DecodeBoth(self, layer)

    def assign(self, rows: Sequence[int | None]) -> None:
        """Chooses the rows, between steps; `None`, and what is not given, is padding."""
        assert len(rows) <= self.size, (rows, self.size)
        self.rows = [*rows, *[None] * (self.size - len(rows))]
        padding = self.pool.num_rows
        numbers = [padding if row is None else row for row in self.rows]
        send(np.array(numbers, dtype=np.int64), self.rows_B)
        lengths = [0 if row is None else self.pool.lengths[row] for row in self.rows]
        send(np.array(lengths, dtype=np.int32), self.lengths_B)
        active = [row is not None for row in self.rows]
        send(np.array(active, dtype=np.int32), self._active_B)
        for window, kind in self.pool.kinds.items():
            table_BN = np.zeros((self.size, kind.row_blocks), dtype=np.int32)
            for place, row in enumerate(self.rows):
                if row is not None:
                    table_BN[place] = kind.table_RN[row]
                    self._known[window][place] = kind.num_owned[row]
            send(table_BN, self.tables[window])

    def begin_step(self) -> None:
        """Every row gets one token longer; new blocks are made known to the device.

        Raises:
            RequestError: a row cannot become so long (it was not reserved in advance). No row has
                changed then.
        """
        rows = [(place, row) for place, row in enumerate(self.rows) if row is not None]
        for _, row in rows:
            self.pool.reserve(row, self.pool.lengths[row] + 1)
        for place, row in rows:
            self.pool.grow(row, 1)
            for window, kind in self.pool.kinds.items():
                if self._known[window][place] != kind.num_owned[row]:
                    self._known[window][place] = kind.num_owned[row]
                    send(kind.table_RN[row], self.tables[window][place])

    def advance(self) -> None:
        """Lengths and positions of the next token, and the states that it begins from, on the
        device; part of a captured step."""
        self.pool.states.fetch(self.rows_B)
        self.lengths_B.add_(self._active_B)
        self.position_ids_B1.copy_((self.lengths_B - self._active_B)[:, None])

    def put_back(self) -> None:
        """The rows have the states that the forward has left; part of a captured step."""
        self.pool.states.put_back(self.rows_B)


class _DecodeLayer(CacheLayerMixin):
    """Also the `KVView` of its layer."""

    def __init__(self, batch: DecodeBatch, layer: AttentionLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels, self._window, self._latent = batch.kernels, layer.window, layer.latent
        self.keeps_latents = layer.latent is not None
        assert layer.window is None or not self.keeps_latents
        # Stock code that makes a mask of what was chosen asks for it, and hands it to us.
        self.shape = (0, 0, 0, 0)
        self._pool = (
            *batch.pool.pools[layer.index],
            batch.tables[layer.window],
            batch.lengths_B,
        )
        self._exponents = batch.pool.exponents[layer.index]
        self._rows_B = batch.rows_B
        index = batch.pool.indices.get(layer.index)
        self._chooser = None if index is None else Chooser(index, batch.kernels)
        self.is_sliding = layer.window is not None
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Writes [B, Hkv, 1, D]; returns itself twice, for the attention function."""
        assert key_states.shape[2] == 1
        self._kernels.write(
            *(key_states.transpose(1, 2), value_states.transpose(1, 2), *self._pool),
            exponents=self._exponents,
        )
        return self, self

    def attend(
        self,
        q_BQTD: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks_Q: torch.Tensor | None,
    ) -> torch.Tensor:
        assert q_BQTD.shape[2] == 1
        out_BQD = self._kernels.decode(
            q_BQTD[:, :, 0],
            *self._pool,
            scale=scale,
            window=self._window,
            softcap=softcap,
            sinks_Q=sinks_Q,
            exponents=self._exponents,
        )
        return out_BQD.unsqueeze(1)

    def update_indexer(self, new: torch.Tensor | PooledKeys) -> IndexKeys:
        """Writes [B, 1, D], or what pooled keys are made of."""
        assert self._chooser is not None
        _, _, *rows = self._pool
        self._chooser.index.append(new, self._rows_B, *rows)

        def choose(q_BTHD: torch.Tensor, weights_BTH: torch.Tensor, top_k: int) -> Selection:
            assert self._chooser is not None and top_k == self._chooser.indexer.top_k
            return self._chooser.of_rows(q_BTHD, weights_BTH, *rows)

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
        assert q_BQTD.shape[2] == 1 and self._latent is not None
        latents, rope, table, lengths = self._pool
        if selection is not None and selection.slots_NK is not None:
            assert selection.counts_N is not None
            latents, rope = as_tokens(latents), as_tokens(rope)
            table, lengths = selection.slots_NK, selection.counts_N

        def attend(q_BQR: torch.Tensor, q_BQD: torch.Tensor) -> torch.Tensor:
            return self._kernels.decode_latents(
                *(q_BQR, q_BQD, latents, rope, table, lengths), scale=scale, sinks_Q=sinks_Q
            )

        weight_QER = by_head(weight, q_BQTD.shape[1])
        out_BQV = attend_absorbed(q_BQTD[:, :, 0], weight_QER, self._latent.rope_dim, attend)
        return out_BQV.unsqueeze(1)

    def get_seq_length(self) -> int:
        raise AssertionError("the rows of a decode step have no one length")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of a mask that nobody looks into (`models.attention`)."""
        return query_length, 0

    def get_max_length(self) -> int:
        raise AssertionError("the rows of a decode step have no one length")

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the pool is there before the first forward."""


class _DecodeBoth(_DecodeLayer, StateView):
    """A layer that keeps a state beside keys and values."""

    def __init__(self, batch: DecodeBatch, layer: AttentionLayer) -> None:
        StateView.__init__(self, batch.pool.states.places(layer.index, batch.size), begun=True)
        _DecodeLayer.__init__(self, batch, layer)
