"""The rows that decode together: what is in flight of each, and what was drawn.

Over the KV pool a step serves all rows at once (or each by itself, see `Decoding`), and the next
one is queued before the last one's tokens are known, as long as no row joins or leaves. Without a
pool there is one row, in the library's cache. Knows sequences and tokens; nothing of requests or
of why a row leaves. All of it runs within `Steps.exclusive`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from hotset.core.config import EngineConfig
from hotset.core.errors import HardwareError
from hotset.core.geometry import ModelGeometry
from hotset.core.plan import MemoryPlan
from hotset.runtime.decode import MOST_IN_FLIGHT, DecodeStep
from hotset.runtime.decoding import Decoding, prefix_grain
from hotset.runtime.sampling import Draw, Sampler
from hotset.runtime.sequences import LibrarySequence, Sequence
from hotset.runtime.steps import Steps

logger = logging.getLogger(__name__)


class Rows(Protocol):
    """Sequences that decode, each a row of the sampler."""

    @property
    def num_rows(self) -> int:
        """Most sequences at a time."""

    @property
    def num_in_flight(self) -> int:
        """Steps that are queued and not taken in."""

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Blocks of full attention, and those that sequences hold."""

    def open(self, num_tokens: int, ids: Items[int] = ()) -> Sequence | None:
        """A new sequence, which may become `num_tokens` long whatever others do; `None` while
        there is no room.

        Args:
            ids: what it will begin with. It may share what others have of these tokens; at least
                the last one is left to take in.
        """

    def join(self, sequence: Sequence, token: int, num_tokens: int) -> None:
        """A sequence decodes from the next step on.

        Args:
            sequence: from `open`; its prompt has been taken in.
            token: the newest one, which the step takes in.
            num_tokens: how many may be drawn behind it, at least one.
        """

    def leave(self, row: int) -> None:
        """A row decodes no more; what is queued of it is not given out."""

    def step(self, *, ahead: bool) -> list[tuple[int, Draw]]:
        """The next draw of each row that was there when its step was queued.

        Args:
            ahead: steps may stay in flight behind it.
        """

    def drain(self) -> list[tuple[int, Draw]]:
        """Takes in what is in flight."""

    def forget(self) -> None:
        """Forgets what is in flight after a step broke off. It may have run in part, so every row
        has to leave, and slots to be mended (`Steps.mend`)."""


@dataclass(eq=False)
class _Row:
    """A row that decodes.

    Attributes:
        sequence: its own.
        token: the newest known.
        left: steps that may still be queued for it.
        in_flight: steps that are.
    """

    sequence: Sequence
    token: int
    left: int
    in_flight: int = 0


class PoolRows:
    """Rows of the KV pool.

    Args:
        decoding: pool and steps.
        steps: keeps the books.
        sampler: what the steps draw with.
    """

    def __init__(self, decoding: Decoding, steps: Steps, sampler: Sampler) -> None:
        self._decoding, self._steps, self._sampler = decoding, steps, sampler
        self._rows: dict[int, _Row] = {}
        self._queued: deque[tuple[DecodeStep, list[_Row]]] = deque()
        self._started: dict[DecodeStep, list[_Row]] = {}

    @property
    def num_rows(self) -> int:
        return self._decoding.pool.num_rows

    @property
    def num_in_flight(self) -> int:
        return len(self._queued)

    @property
    def num_blocks(self) -> tuple[int, int]:
        return self._decoding.pool.num_full_blocks

    def open(self, num_tokens: int, ids: Items[int] = ()) -> Sequence | None:
        return self._decoding.sequence(num_tokens, ids)

    def join(self, sequence: Sequence, token: int, num_tokens: int) -> None:
        assert sequence.row not in self._rows and num_tokens > 0
        self._rows[sequence.row] = _Row(sequence, token, num_tokens)

    def leave(self, row: int) -> None:
        del self._rows[row]

    def step(self, *, ahead: bool) -> list[tuple[int, Draw]]:
        for step, numbers in self._decoding.steps_for(sorted(self._rows)):
            self._queue(step, [self._rows[number] for number in numbers], ahead=ahead)
        # The oldest of each step: they take turns, so these come first.
        num_due = len({step for step, _ in self._queued})
        return [drawn for _ in range(num_due) for drawn in self._finish()]

    def drain(self) -> list[tuple[int, Draw]]:
        return [drawn for _ in range(len(self._queued)) for drawn in self._finish()]

    def forget(self) -> None:
        for step in self._decoding.steps:
            step.abandon()
        self._queued.clear()
        self._started.clear()

    def _queue(self, step: DecodeStep, rows: list[_Row], *, ahead: bool) -> None:
        """Queues a step until so many are in flight as may be, or one of the rows must end."""
        if self._started.get(step) != rows:
            if step.num_in_flight or any(row.in_flight for row in rows):
                return  # what is queued is taken in first
            step.start([row.sequence.row for row in rows], [row.token for row in rows])
            # These rows go on here: what a step of another size knows of them is old from now on,
            # also for the day when the same rows come back to it.
            others = {other: old for other, old in self._started.items() if not _meet(old, rows)}
            self._started = {**others, step: rows}
        # What a row may draw next can depend on its last token, which the host has to see.
        waits = any(
            self._sampler.needs_host(row.sequence.row, num_steps=MOST_IN_FLIGHT) for row in rows
        )
        most = MOST_IN_FLIGHT if ahead and step.captured and not waits else 1
        while step.num_in_flight < most and all(row.left for row in rows):
            step.launch()
            self._queued.append((step, rows))
            for row in rows:
                row.left -= 1
                row.in_flight += 1

    def _finish(self) -> Iterator[tuple[int, Draw]]:
        step, rows = self._queued.popleft()
        result = step.finish()
        # Of a row that has left, what was queued is no part of its sequence any more.
        stayed = [self._rows.get(row.sequence.row) is row for row in rows]
        owners: list[tuple[Hashable, int]] = [
            (row.sequence if stays else None, 1) for row, stays in zip(rows, stayed, strict=True)
        ]
        self._steps.account(result.ids_LN, filled=step.fills is not None, owners=owners)
        for row, stays, draw in zip(rows, stayed, result.draws, strict=False):
            row.in_flight -= 1
            row.token = draw.token
            if stays:
                yield row.sequence.row, draw


def _meet(some: list[_Row], others: list[_Row]) -> bool:
    return any(row in others for row in some)


class LibraryRows:
    """One row, in the library's own cache: any architecture, launch by launch.

    Args:
        model: with experts bound.
        steps: keeps the books.
        sampler: draws the tokens.
        device: of the model.
    """

    num_rows = 1
    num_in_flight = 0
    num_blocks = (0, 0)

    def __init__(
        self, model: PreTrainedModel, steps: Steps, sampler: Sampler, *, device: torch.device
    ) -> None:
        self._model, self._steps, self._sampler, self._device = model, steps, sampler, device
        self._sequence: LibrarySequence | None = None
        self._row: _Row | None = None

    def open(self, num_tokens: int, ids: Items[int] = ()) -> Sequence | None:
        if self._sequence is not None and not self._sequence.closed:
            return None
        self._sequence = LibrarySequence(self._model, self._steps, device=self._device)
        return self._sequence

    def join(self, sequence: Sequence, token: int, num_tokens: int) -> None:
        assert self._row is None and num_tokens > 0
        self._row = _Row(sequence, token, num_tokens)

    def leave(self, row: int) -> None:
        assert self._row is not None
        self._row = None

    def step(self, *, ahead: bool) -> list[tuple[int, Draw]]:
        row = self._row
        if row is None:
            return []
        assert row.left > 0
        logits_1V = row.sequence.forward([row.token], num_logits=1)
        draw = self._sampler.draw(row.sequence.row, logits_1V[-1])
        row.token, row.left = draw.token, row.left - 1
        return [(row.sequence.row, draw)]

    def drain(self) -> list[tuple[int, Draw]]:
        return []

    def forget(self) -> None:
        """Nothing is in flight, ever."""


def make_rows(
    model: PreTrainedModel,
    decoding: Decoding | None,
    *,
    steps: Steps,
    sampler: Sampler,
    geometry: ModelGeometry,
    plan: MemoryPlan,
    config: EngineConfig,
    device: torch.device,
) -> Rows:
    """The rows of an engine; what they cannot do of what its config asks for is said.

    Raises:
        HardwareError: the latter, in a strict engine.
    """
    if decoding is not None:
        return PoolRows(decoding, steps, sampler)
    if config.max_batch > 1:
        said = f"requests are answered one by one: {geometry.attention_reason}"
        if config.strict:
            raise HardwareError(said, hint="leave `--strict` out to run it all the same")
        logger.warning("%s", said)
    prefix_grain(geometry, plan, config)  # says that none are reused
    return LibraryRows(model, steps, sampler, device=device)
