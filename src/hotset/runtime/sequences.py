"""One sequence in a cache, in two forms: over our KV pool, or in the library's own cache.

A sequence takes tokens in, the next ones of a prompt or a single decoded one. Decoding many
together is `rows`'s business; why an answer ends, and what tokens mean, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Items
from functools import partial
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hotset.kernels.attention import AttentionKernels
from hotset.models.attention import AttentionSwitch
from hotset.runtime.kv_cache import KVCache
from hotset.runtime.kv_pool import KVPool
from hotset.runtime.kv_prefill import PrefillStep
from hotset.runtime.moe import MATCH_TOKENS
from hotset.runtime.steps import Steps

# Forwards of chunks, in the order of the text -> what they return: logits [n, V] of each
RunForwards = Callable[[Items[Callable[[], torch.Tensor]]], list[torch.Tensor]]


class Sequence(Hashable, Protocol):
    """A sequence."""

    @property
    def row(self) -> int:
        """Its number among the sequences that are open: a row of the sampler."""

    @property
    def length(self) -> int:
        """Tokens that it has keys and values of; at first those that it shares with others."""

    def forward(self, ids: list[int], *, num_logits: int) -> torch.Tensor:
        """Takes tokens in, in one forward; logits [n, V] of the last `num_logits` of them.

        Within `Steps.exclusive`.
        """

    def take_in(self, chunks: Items[list[int]], run: RunForwards) -> torch.Tensor:
        """Takes a prompt in, chunk after chunk or all of them together; logits [V] of its end.

        Within `Steps.exclusive`.

        Args:
            chunks: the tokens of each forward.
            run: runs the forwards of chunks that are taken in together.
        """

    def keep(self, ids: Items[int], *, decoded: bool = False) -> None:
        """Lets later sequences share what this one has of its first tokens, where that may be.

        Args:
            ids: these tokens.
            decoded: decode steps took some of them in.
        """

    def close(self) -> None:
        """Gives the cache back."""


class LibrarySequence:
    """In transformers' own cache: any architecture, launch by launch.

    Args:
        model: with experts bound.
        steps: keeps the books.
        device: of the model.

    Attributes:
        closed: its cache is gone.
    """

    row = 0  # there is one at a time

    def __init__(self, model: PreTrainedModel, steps: Steps, *, device: torch.device) -> None:
        self._model, self._steps, self._device = model, steps, device
        self._cache: Cache | None = None  # the model makes its own kind
        self._length, self.closed = 0, False

    def forward(self, ids: list[int], *, num_logits: int) -> torch.Tensor:
        return self._steps.run(
            len(ids), partial(self._forward, ids, num_logits=num_logits), owner=self
        )

    def take_in(self, chunks: Items[list[int]], run: RunForwards) -> torch.Tensor:
        """One chunk after the other: the library's masks of all of them at once would take memory
        that grows with the square of the prompt."""
        for ids in chunks:
            forward = partial(self._forward, ids, num_logits=1)
            if len(ids) <= MATCH_TOKENS:  # it may fill slots, and nothing may come between
                logits = self._steps.run(len(ids), forward, owner=self)
            else:
                (logits,) = self._steps.run(len(ids), partial(run, [forward]), owner=self)
        return logits[-1]

    def _forward(self, ids: list[int], *, num_logits: int) -> torch.Tensor:
        out = self._model(
            input_ids=torch.tensor([ids], device=self._device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        self._cache = out.past_key_values
        self._length += len(ids)
        logits: torch.Tensor = out.logits[0]
        return logits

    @property
    def length(self) -> int:
        return self._length

    def keep(self, ids: Items[int], *, decoded: bool = False) -> None:
        """The library's cache is never shared."""

    def close(self) -> None:
        self._cache, self.closed = None, True
        self._steps.end(self)


class PoolSequence:
    """A row of the KV pool.

    Args:
        model: with experts bound.
        steps: keeps the books.
        pool: of the row.
        row: an open row of it, which is this sequence's from now on.
        kernels: attention kernels.
        exact: what decode steps took in is never shared; see `Decoding`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        steps: Steps,
        *,
        pool: KVPool,
        row: int,
        kernels: AttentionKernels,
        exact: bool,
    ) -> None:
        self._model, self._steps, self._pool = model, steps, pool
        self._kernels, self._exact = kernels, exact
        self._row = row
        self._switch = AttentionSwitch(model)

    @property
    def row(self) -> int:
        return self._row

    @property
    def length(self) -> int:
        return self._pool.lengths[self._row]

    def forward(self, ids: list[int], *, num_logits: int) -> torch.Tensor:
        step = PrefillStep(self._pool, self._row, len(ids), kernels=self._kernels)
        with self._switch.decode():
            logits = self._steps.run(
                len(ids), partial(self._forward, ids, step, num_logits=num_logits), owner=self
            )
        step.commit()
        return logits

    def take_in(self, chunks: Items[list[int]], run: RunForwards) -> torch.Tensor:
        """All chunks together, layers outermost: missing experts cross the link once. Of the
        single tokens by which some models go on, some at a time: each chunk that waits for others
        has a stack and outputs of its own.

        A prompt that decode steps could have filled slots for does so too, one chunk after the
        other: what it reads stays, and nothing may come between.
        """
        for group in _groups(chunks):
            logits_V = self._take_in_together(group, run)
        return logits_V

    def _take_in_together(self, chunks: Items[list[int]], run: RunForwards) -> torch.Tensor:
        num_tokens = sum(map(len, chunks))
        if num_tokens <= MATCH_TOKENS:
            return [self.forward(ids, num_logits=1)[-1] for ids in chunks][-1]
        steps: list[PrefillStep] = []
        for ids in chunks:
            ahead = sum(step.num_tokens for step in steps)
            steps.append(
                PrefillStep(self._pool, self._row, len(ids), kernels=self._kernels, ahead=ahead)
            )
        forwards = [
            partial(self._forward, ids, step, num_logits=1)
            for ids, step in zip(chunks, steps, strict=True)
        ]
        with self._switch.decode():
            logits = self._steps.run(num_tokens, partial(run, forwards), owner=self)
        for step in steps:
            step.commit()
        return logits[-1][-1]

    def _forward(self, ids: list[int], step: PrefillStep, *, num_logits: int) -> torch.Tensor:
        out = self._model(
            input_ids=torch.tensor([ids], device=self._pool.device),
            position_ids=step.position_ids,
            past_key_values=KVCache(step),
            use_cache=True,
            logits_to_keep=num_logits,
        )
        logits: torch.Tensor = out.logits[0]
        return logits

    def keep(self, ids: Items[int], *, decoded: bool = False) -> None:
        if not (decoded and self._exact):
            self._pool.keep(self._row, ids)

    def close(self) -> None:
        self._pool.close(self._row)
        self._steps.end(self)


def _groups(chunks: Items[list[int]]) -> Iterator[Items[list[int]]]:
    """Chunks that run together: all of them, or the first one and then single tokens by the
    hundred, more than a step may have that fills slots."""
    if len(chunks) < 3 or len(chunks[1]) > 1:
        yield chunks
        return
    yield chunks[:1]
    for start in range(1, len(chunks), 2 * MATCH_TOKENS):
        yield chunks[start : start + 2 * MATCH_TOKENS]
