"""What the running step routed, and what that cost: experts used, hits, bytes over the link.

Keeps routed ids on the device until the step is over and fetches them with one copy. Knows
nothing of tokens or text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from hotset.core.geometry import MoELayer
from hotset.core.placement import Matches
from hotset.core.slot_pools import IntArray
from hotset.experts.transfer import Downloads


@dataclass
class Traffic:
    """Counts since the engine started.

    Attributes:
        steps: forward passes.
        used: experts used, each once per layer and step.
        hits: those that had a slot.
        link_bytes: bytes of the others; each crosses the link once per step.
        fills: slots that a step filled as it read.
    """

    steps: int = 0
    used: int = 0
    hits: int = 0
    link_bytes: int = 0
    fills: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of used experts that had a slot; 1 before anything was used."""
        return self.hits / self.used if self.used else 1.0

    def minus(self, earlier: Traffic) -> Traffic:
        """What came after `earlier`, which is an older copy of the same counts."""
        return Traffic(
            self.steps - earlier.steps,
            self.used - earlier.used,
            self.hits - earlier.hits,
            self.link_bytes - earlier.link_bytes,
            self.fills - earlier.fills,
        )

    def copy(self) -> Traffic:
        return replace(self)


class RoutingLog:
    """Collects the routed ids of one step, layer by layer.

    Args:
        layers: the MoE layers.
    """

    def __init__(self, layers: tuple[MoELayer, ...]) -> None:
        self._layers = layers
        self._record_bytes_L = np.array([layer.expert.record_bytes for layer in layers])
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._downloads = Downloads()
        self.total = Traffic()

    def add(self, layer: int, ids_TK: torch.Tensor) -> None:
        """Notes what a layer routed; the tensor must not be written afterwards."""
        self._pending.append((layer, ids_TK))

    def fetch(
        self, layer: int, ids_TK: torch.Tensor, counts: Sequence[torch.Tensor]
    ) -> Callable[[], tuple[IntArray, IntArray]]:
        """Sends what a layer of a prompt routed to the host, and how many tokens its experts have.

        Args:
            ids_TK: of all tokens.
            counts: int32 [E] each.

        Returns:
            Waits until it is known, whatever has been queued since; notes it, and gives the ids,
            int32 [T, K], and the counts [P, E].
        """
        flat = torch.cat([ids_TK.reshape(-1).to(torch.int32), *counts])
        wait = self._downloads.begin(flat)

        @cache
        def known() -> tuple[IntArray, IntArray]:
            host = wait()
            host_TK = host[: ids_TK.numel()].view(ids_TK.shape)
            self.add(layer, host_TK)
            counts_PE: IntArray = host[ids_TK.numel() :].view(len(counts), -1).numpy()
            found: IntArray = host_TK.numpy()
            return found, counts_PE

        return known

    def take(self) -> np.ndarray:
        """Ends the step: its routed ids, [L, N] int32, padded with -1."""
        return self.send()()

    def send(self) -> Callable[[], np.ndarray]:
        """Ends the step behind what the current stream has queued by now.

        Returns:
            Waits for that, and not for what is queued later; see `take`.
        """
        pending, self._pending = self._pending, []
        assert len({layer for layer, _ in pending}) == len(pending), "a layer ran twice in a step"
        if not pending:
            return lambda: self._table([], np.empty(0, dtype=np.int32))
        # One copy for all layers, whatever their shapes.
        flat = torch.cat([ids.reshape(-1).to(torch.int32) for _, ids in pending])
        wait = self._downloads.begin(flat)
        sizes = [(layer, ids.numel()) for layer, ids in pending]
        return lambda: self._table(sizes, wait().numpy())

    def _table(self, sizes: list[tuple[int, int]], flat: np.ndarray) -> np.ndarray:
        """[L, N] of the ids of these layers, so many of each, one behind the other."""
        width = max((size for _, size in sizes), default=1)
        ids_LN = np.full((len(self._layers), width), -1, dtype=np.int32)
        start = 0
        for layer, size in sizes:
            ids_LN[layer, :size] = flat[start : start + size]
            start += size
        return ids_LN

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within the block another step's layers may log; that is forgotten behind it, and the
        step that was running goes on where it was."""
        outer, self._pending = self._pending, []
        try:
            yield
        finally:
            self._pending = outer

    def count(self, matches: Matches) -> None:
        """Counts what a step used and hit, each expert once in a layer."""
        used_L = np.count_nonzero(matches.routed_LN, axis=1)
        hits_L = np.count_nonzero(matches.hit_LN, axis=1)
        self.total.steps += 1
        self.total.used += int(used_L.sum())
        self.total.hits += int(hits_L.sum())
        self.total.link_bytes += int((used_L - hits_L) @ self._record_bytes_L)
        self.total.fills += len(matches)

    def count_layer(self, layer: int, *, used: int, hits: int) -> None:
        """Counts one layer of a step whose layers may run under different placements."""
        self.total.used += used
        self.total.hits += hits
        self.total.link_bytes += (used - hits) * int(self._record_bytes_L[layer])

    def drop(self) -> None:
        """Forgets an unfinished step."""
        self._pending.clear()
