"""Records what a running engine routes into a trace file: ids of experts, never of tokens.

Knows sequences and files; nothing of prompts, and so nothing that it writes is text. The file is
bounded, and recording never fails a request: when the file is full or the disk is, it stops and
says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from hotset.core.closing import Closing
from hotset.core.errors import ConfigError, RequestError
from hotset.core.slot_pools import IntArray
from hotset.core.trace import TraceInfo
from hotset.core.trace_file import DEFAULT_MAX_BYTES, TraceWriter
from hotset.core.units import format_bytes
from hotset.runtime.steps import Owners, Steps

logger = logging.getLogger(__name__)


class RoutingRecorder(Closing):
    """A watcher of `Steps` that writes a trace.

    Args:
        path: of the trace file; an existing one is replaced.
        info: of the model.
        max_bytes: the file never grows beyond it.

    Attributes:
        domain: what sequences that begin from now on are called, may be empty.
        num_tokens, num_sequences: recorded so far.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self, path: Path | str, info: TraceInfo, *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        try:
            self._writer = TraceWriter(path, info, max_bytes=max_bytes)
        except OSError as error:
            raise ConfigError(f"`{path}` cannot be written: {error.strerror}") from error
        self._path, self._top_k, self._max_bytes = path, info.fingerprint.top_k, max_bytes
        self._numbers: dict[Hashable, int] = {}
        self._stopped = False
        self.domain = ""
        self.num_tokens = self.num_sequences = 0

    @property
    def stopped(self) -> bool:
        """Nothing more is recorded: the file is full, or could not be written."""
        return self._stopped

    def step(self, ids_LN: IntArray, owners: Owners) -> None:
        """See `Watcher`."""
        if self._stopped or not owners:
            return
        ids_TLK = tokens_of(ids_LN, self._top_k, sum(count for _, count in owners))
        first = 0
        for owner, count in owners:
            if owner is not None:
                self._append(owner, ids_TLK[first : first + count])
            first += count

    def _append(self, owner: Hashable, ids_TLK: IntArray) -> None:
        with self._surviving():
            if owner not in self._numbers:
                self._numbers[owner] = self._writer.open_sequence(self.domain)
                self.num_sequences += 1
            if self._writer.append(self._numbers[owner], ids_TLK):
                self.num_tokens += len(ids_TLK)
            else:
                self._stop(f"it has reached {format_bytes(self._max_bytes)}")

    def end(self, owner: Hashable) -> None:
        """See `Watcher`."""
        number = self._numbers.pop(owner, None)
        if number is not None and not self._stopped:
            with self._surviving():
                self._writer.close_sequence(number)

    def close(self) -> None:
        """Writes what is pending and closes the file. May be called twice."""
        with self._surviving():
            self._writer.close()
        self._numbers.clear()
        self._stopped = True

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """A recording is not worth a request: a disk that takes no more ends it."""
        try:
            yield
        except OSError as error:
            self._stop(error.strerror or str(error))

    def _stop(self, reason: str) -> None:
        if not self._stopped:
            self._stopped = True
            logger.warning("recording to `%s` stops: %s", self._path, reason)


@contextmanager
def recording(steps: Steps, recorder: RoutingRecorder) -> Iterator[RoutingRecorder]:
    """Within the block the recorder sees every step; the file is closed behind it."""
    with recorder:
        with steps.exclusive():
            steps.watchers.append(recorder)
        try:
            yield recorder
        finally:
            # Of a closed engine no step comes any more.
            with suppress(RequestError), steps.exclusive():
                steps.watchers.remove(recorder)


def tokens_of(ids_LN: IntArray, top_k: Sequence[int], num_tokens: int) -> IntArray:
    """Routed ids by token, [T, L, K], of those by layer; -1 pads layers with a smaller top-k.

    Args:
        ids_LN: in each layer the ids of the first token, of the second one, and so on.
        top_k: of each layer.
        num_tokens: T.
    """
    ids_TLK = np.full((num_tokens, len(top_k), max(top_k)), -1, dtype=np.int64)
    for layer, k in enumerate(top_k):
        ids_TLK[:, layer, :k] = ids_LN[layer, : num_tokens * k].reshape(num_tokens, k)
    return ids_TLK
