"""One sequence in a cache, in two forms: over our KV pool, or in the library's own cache.

A sequence takes tokens in (`forward`) and decodes on its own (`tokens`). Knows ids and caches;
why decoding ends, and what tokens mean, is the engine's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hotset.kernels.attention import AttentionKernels
from hotset.runtime.decode import MOST_IN_FLIGHT, DecodeStep
from hotset.runtime.kv_cache import KVCache, PrefillStep
from hotset.runtime.kv_pool import KVPool
from hotset.runtime.sampling import Sampler, require_finite
from hotset.runtime.steps import Steps


class Sequence(Protocol):
    """A sequence, empty when it is made."""

    def forward(self, ids: list[int], *, num_logits: int) -> torch.Tensor:
        """Takes tokens in, in one forward; logits [n, V] of the last `num_logits` of them.

        Within `Steps.exclusive`.
        """

    def tokens(self, first: int, num_tokens: int, sampler: Sampler) -> Iterator[int]:
        """Decodes up to `num_tokens` tokens, starting with the one that follows `first`.

        Raises:
            RequestError: a step failed; the tokens so far are right.
        """

    def close(self) -> None:
        """Gives the cache back."""


class LibrarySequence:
    """In transformers' own cache: any architecture, launch by launch.

    Args:
        model: with experts bound.
        steps: keeps the books.
        device: of the model.
    """

    def __init__(self, model: PreTrainedModel, steps: Steps, *, device: torch.device) -> None:
        self._model, self._steps, self._device = model, steps, device
        self._cache: Cache | None = None  # the model makes its own kind

    def forward(self, ids: list[int], *, num_logits: int) -> torch.Tensor:
        out = self._steps.run(
            len(ids),
            lambda: self._model(
                input_ids=torch.tensor([ids], device=self._device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=num_logits,
            ),
            owner=self,
        )
        self._cache = out.past_key_values
        logits: torch.Tensor = out.logits[0]
        return logits

    def tokens(self, first: int, num_tokens: int, sampler: Sampler) -> Iterator[int]:
        token = first
        for _ in range(num_tokens):
            with self._steps.exclusive():
                token = sampler.draw(self.forward([token], num_logits=1)[-1])
            yield token

    def close(self) -> None:
        self._cache = None
        self._steps.end(self)


class PoolSequence:
    """A row of the KV pool, decoded by the engine's captured step.

    Args:
        model: with experts bound.
        steps: keeps the books.
        pool: has a free row.
        kernels: attention kernels.
        decode: the step for one row, sampling with the sampler that `tokens` is given.

    Raises:
        RequestError: all rows are in use.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        steps: Steps,
        *,
        pool: KVPool,
        kernels: AttentionKernels,
        decode: DecodeStep,
    ) -> None:
        self._model, self._steps, self._pool = model, steps, pool
        self._kernels, self._decode = kernels, decode
        self._row = pool.open()

    def forward(self, ids: list[int], *, num_logits: int) -> torch.Tensor:
        step = PrefillStep(self._pool, self._row, len(ids), kernels=self._kernels)
        out = self._steps.run(
            len(ids),
            lambda: self._model(
                input_ids=torch.tensor([ids], device=self._pool.device),
                position_ids=step.position_ids,
                past_key_values=KVCache(step),
                use_cache=True,
                logits_to_keep=num_logits,
            ),
            owner=self,
        )
        step.commit()
        logits: torch.Tensor = out.logits[0]
        return logits

    def tokens(self, first: int, num_tokens: int, sampler: Sampler) -> Iterator[int]:
        """The next step is queued before the last one's token is known: only its end needs it."""
        decode, ahead = self._decode, MOST_IN_FLIGHT if self._decode.captured else 1
        launched = 0
        with self._steps.exclusive():
            decode.start([self._row], [first])
        try:
            for count in range(num_tokens):
                with self._unbroken():
                    while launched < min(num_tokens, count + ahead):
                        decode.launch()
                        launched += 1
                    token, finite = self._finish()
                yield require_finite(token, finite=finite)
        finally:
            self._drain()

    def _drain(self) -> None:
        """Takes in what was queued ahead of the end, which is no part of the sequence any more; of
        a closed engine nothing more is told."""
        while self._decode.num_in_flight:
            if self._steps.closed:
                self._decode.finish()
            else:
                with self._unbroken():
                    self._finish(is_own=False)

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Holds others back, and lets nothing of a step that breaks off stay in flight: books that
        miss a step would call slots by wrong names ever after."""
        with self._steps.exclusive():
            try:
                yield
            except BaseException:
                self._decode.abandon()
                raise

    def _finish(self, *, is_own: bool = True) -> tuple[int, bool]:
        result = self._decode.finish()
        filled, owners = self._decode.fills is not None, ((self, 1),) if is_own else ()
        self._steps.account(result.ids_LN, filled=filled, owners=owners)
        return int(result.tokens_B[0]), bool(result.finite_B[0])

    def close(self) -> None:
        self._pool.close(self._row)
        self._steps.end(self)
