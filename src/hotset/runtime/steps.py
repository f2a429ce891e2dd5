"""Runs forwards one at a time and keeps the books: traffic, fills, and what a failed step leaves.

Knows which experts a step routed to; nothing of tokens, caches or why the step runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import numpy as np
import torch

from hotset.core.errors import RequestError
from hotset.core.placement import Matches
from hotset.core.policy import NUM_VICTIMS, Wishes
from hotset.core.slot_pools import IntArray
from hotset.experts.store import ExpertStore
from hotset.runtime.fills import FillPlanner
from hotset.runtime.moe import MATCH_TOKENS
from hotset.runtime.routing import RoutingLog, Traffic

T = TypeVar("T")

# Whose tokens a step ran, in their order in the step, and how many each.
Owners = Sequence[tuple[Hashable, int]]


class Watcher(Protocol):
    """Is told what every step routed: a recorder, a drift figure. Must not raise."""

    def step(self, ids_LN: IntArray, owners: Owners) -> None:
        """One step.

        Args:
            ids_LN: routed ids of each MoE layer, token by token; padding -1.
            owners: the sequences that its tokens belong to; empty for tokens of no sequence.
        """

    def end(self, owner: Hashable) -> None:
        """A sequence is over; it may never have run."""


class Steps:
    """The steps of one engine.

    Args:
        store: whose placement a step runs under.
        log: what the layers tell their routed ids.
        fills: `None` when no slot is ever filled by a step.

    Attributes:
        watchers: told of every step; add and remove them within `exclusive`.
    """

    def __init__(self, store: ExpertStore, log: RoutingLog, fills: FillPlanner | None) -> None:
        self._store, self.log, self.fills = store, log, fills
        self.watchers: list[Watcher] = []
        self._lock = threading.Lock()
        self._closed = False
        shape = (len(store.layers), max(layer.num_experts for layer in store.layers))
        self._nothing = Wishes.none(shape[0], NUM_VICTIMS, shape[1])

    @property
    def traffic(self) -> Traffic:
        """Experts used, hits and link bytes since the start; a copy."""
        return self.log.total.copy()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds every other step, placement or end of the engine back.

        Raises:
            RequestError: the engine is closed.
        """
        with self._lock, torch.inference_mode():
            if self._closed:
                raise RequestError("this engine is closed", hint="load the model again")
            yield

    def close(self) -> None:
        """Waits for the step that runs; none begins any more. Lets go of slots and arena."""
        with self._lock:
            self._closed = True
            self.fills = None
            del self._store

    @property
    def closed(self) -> bool:
        return self._closed

    def mend(self) -> None:
        """Mends slots and table after a queued step broke off: it may have run in part."""
        if self.fills is not None:
            self.fills.abandon()

    def run(self, num_tokens: int, forward: Callable[[], T], *, owner: Hashable = None) -> T:
        """One forward whose layers log what they route, within `exclusive`.

        A step of few tokens may fill slots as it reads; a longer one only tells the policy what
        it used. Between two layers of such a longer one decode steps may run, which are queued and
        accounted for there; no step may be in flight when one begins that fills.

        Args:
            owner: the sequence that the tokens belong to.
        """
        try:  # all of it: an interruption may come while the books are kept, too
            self.begin(num_tokens)
            result = forward()
            ids_LN = self._routed(num_tokens)
            self.finish(num_tokens, ids_LN, () if owner is None else ((owner, num_tokens),))
        except BaseException:
            self.break_off(num_tokens)
            raise
        return result

    def _routed(self, num_tokens: int) -> IntArray:
        """What a step routed. Of a long one, whose layers have counted, only if somebody watches:
        the ids of 32,768 tokens in 12 layers take the host 12 ms, and the first token waits."""
        if num_tokens <= MATCH_TOKENS or self.watchers:
            return self.log.take()
        self.log.drop()
        return np.empty((len(self._store.layers), 0), dtype=np.int32)

    def begin(self, num_tokens: int) -> None:
        """What comes before a forward of so many tokens: the newest wishes, if it may fill."""
        if num_tokens <= MATCH_TOKENS and self.fills is not None:
            self.fills.begin_step()

    def break_off(self, num_tokens: int) -> None:
        """What comes behind a forward of so many tokens that ended before it was through."""
        self.log.drop()
        # A long one fills nothing as it reads. It may have copied a record to a slot and not
        # yet named its owner; otherwise, as when it is cancelled between two layers, all is as
        # it should be, and bringing every slot again would hold the others up for seconds.
        if num_tokens <= MATCH_TOKENS or self._store.is_torn:
            self.mend()

    def finish(self, num_tokens: int, ids_LN: IntArray, owners: Owners = ()) -> None:
        """What comes behind a forward of so many tokens that routed these ids."""
        if num_tokens > MATCH_TOKENS:
            # Its layers have counted, each under the placement that it ran with.
            self.log.total.steps += 1
            if self.fills is not None:
                self.fills.renew()
            self._tell(ids_LN, owners)
        else:
            self.account(ids_LN, filled=self.fills is not None, owners=owners)

    def account(self, ids_LN: IntArray, *, filled: bool, owners: Owners = ()) -> None:
        """Takes in what a step routed, in the order in which steps ran.

        Args:
            ids_LN: routed ids of each MoE layer, padding -1.
            filled: the step ran under the fill planner's wishes.
            owners: see `Watcher.step`.
        """
        if filled:
            assert self.fills is not None
            matches = self.fills.end_step(ids_LN)
        else:
            matches = self.hits(ids_LN)
        self.log.count(matches)
        self._tell(ids_LN, owners)

    def _tell(self, ids_LN: IntArray, owners: Owners) -> None:
        for watcher in self.watchers:
            watcher.step(ids_LN, owners)

    def end(self, owner: Hashable) -> None:
        """Tells the watchers that a sequence is over."""
        for watcher in self.watchers:
            watcher.end(owner)

    def hits(self, ids_LN: IntArray) -> Matches:
        """What a step that fills nothing uses and hits under the placement as it is."""
        nothing = self._nothing
        return self._store.placement.match_step(ids_LN, nothing.victims_LV, nothing.admit_LE)
