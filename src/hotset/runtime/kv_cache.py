"""The pool as the library's `Cache`, in two forms: prefill of one row, decode of many.

What is done is chosen by the step object, never by data. A `PrefillStep` writes the new tokens and
attends to them and to those of earlier chunks, gathered from the pool. A `DecodeBatch` writes one
token a row and attends to the pool itself. Either way the attention function gets the layer itself
in place of keys and values (`models.attention`), and there is no mask. A layer that carries a state
finds it where the library would keep it (`state_rows`). Knows rows and positions, nothing of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from hotset.core.geometry import AttentionLayer
from hotset.experts.transfer import sent
from hotset.kernels.attention import AttentionKernels
from hotset.models.latents import attend_absorbed, attend_expanded, by_head
from hotset.runtime.kv_pool import KVKind, KVPool
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
    """The library's view of a step. Good for one `PrefillStep`, or for the life of a
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

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is taken back: `crop` is refused."""
        return False


def _view(step: Step, index: int) -> CacheLayerMixin | StateView | DummyLayer:
    layer, has_state = step.pool.layers.get(index), index in step.pool.states.layers
    if layer is None:
        return step.state(index) if has_state else DummyLayer()
    return step.both(layer) if has_state else step.attention(layer)


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

    def gather(self, pool: torch.Tensor) -> torch.Tensor:
        """[Hkv, P, D], a strided view of a copy: the tokens that the new ones see of a ring before
        they are written there, or these and the new ones."""
        return pool[self.blocks].flatten(0, 1)[self.gathered].transpose(0, 1)


class _PrefillLayer(CacheLayerMixin):
    """Also the `KVView` of its layer."""

    def __init__(self, step: PrefillStep, layer: AttentionLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step, self._kind, self._window = step, step.kinds[layer.window], layer.window
        self._pools = step.pool.pools[layer.index]
        self.keeps_latents = layer.latent is not None
        assert layer.window is None or not self.keeps_latents
        self._attended: tuple[torch.Tensor, torch.Tensor] | None = None
        self.is_sliding = layer.window is not None
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Writes [1, Hkv, T, D]; returns itself twice, for the attention function."""
        assert key_states.shape[0] == 1 and key_states.shape[2] == self._step.num_tokens
        keys, values = key_states[0], value_states[0]
        k_pool, v_pool = self._pools
        if self._kind.num_seen and self._kind.is_ring:
            # Read first: the new tokens may take the place of what they see.
            keys = torch.cat((self._kind.gather(k_pool), keys), dim=1)
            values = torch.cat((self._kind.gather(v_pool), values), dim=1)
        self._step.kernels.write(
            key_states.transpose(1, 2),
            value_states.transpose(1, 2),
            k_pool,
            v_pool,
            self._kind.table_1N,
            self._step.length_1,
        )
        if self._kind.num_seen and not self._kind.is_ring:
            # One copy of all: what an earlier chunk left and this one, joined, would be two.
            keys, values = self._kind.gather(k_pool), self._kind.gather(v_pool)
        self._attended = keys, values
        return self, self

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

    def attend_latents(
        self, q_BQTD: torch.Tensor, weight: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        assert self._attended is not None
        (latents_1PR, rope_1PD), self._attended = self._attended, None
        weight_QER = by_head(weight, q_BQTD.shape[1])
        return attend_expanded(
            *(q_BQTD[0], latents_1PR[0], rope_1PD[0], weight_QER),
            kernels=self._step.kernels,
            scale=scale,
        )[None]

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
        device, padding = self.pool.device, self.pool.num_rows
        numbers = [padding if row is None else row for row in self.rows]
        self.rows_B.copy_(sent(np.array(numbers, dtype=np.int64), device))
        lengths = [0 if row is None else self.pool.lengths[row] for row in self.rows]
        self.lengths_B.copy_(sent(np.array(lengths, dtype=np.int32), device))
        active = [row is not None for row in self.rows]
        self._active_B.copy_(sent(np.array(active, dtype=np.int32), device))
        for window, kind in self.pool.kinds.items():
            table_BN = np.zeros((self.size, kind.row_blocks), dtype=np.int32)
            for place, row in enumerate(self.rows):
                if row is not None:
                    table_BN[place] = kind.table_RN[row]
                    self._known[window][place] = kind.num_owned[row]
            self.tables[window].copy_(sent(table_BN, device))

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
                    self.tables[window][place].copy_(sent(kind.table_RN[row], self.pool.device))

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
        self._pool = (
            *batch.pool.pools[layer.index],
            batch.tables[layer.window],
            batch.lengths_B,
        )
        self.is_sliding = layer.window is not None
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Writes [B, Hkv, 1, D]; returns itself twice, for the attention function."""
        assert key_states.shape[2] == 1
        self._kernels.write(key_states.transpose(1, 2), value_states.transpose(1, 2), *self._pool)
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
        )
        return out_BQD.unsqueeze(1)

    def attend_latents(
        self, q_BQTD: torch.Tensor, weight: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        assert q_BQTD.shape[2] == 1 and self._latent is not None

        def attend(q_BQR: torch.Tensor, q_BQD: torch.Tensor) -> torch.Tensor:
            return self._kernels.decode_latents(q_BQR, q_BQD, *self._pool, scale=scale)

        weight_QER = by_head(weight, q_BQTD.shape[1])
        out_BQV = attend_absorbed(q_BQTD[:, :, 0], weight_QER, self._latent.rope_dim, attend)
        return out_BQV.unsqueeze(1)

    def get_seq_length(self) -> int:
        raise AssertionError("the rows of a decode step have no one length")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise AssertionError("a decode step has no mask")

    def get_max_length(self) -> int:
        raise AssertionError("the rows of a decode step have no one length")

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the pool is there before the first forward."""


class _DecodeBoth(_DecodeLayer, StateView):
    """A layer that keeps a state beside keys and values."""

    def __init__(self, batch: DecodeBatch, layer: AttentionLayer) -> None:
        StateView.__init__(self, batch.pool.states.places(layer.index, batch.size), begun=True)
        _DecodeLayer.__init__(self, batch, layer)
