"""Reasoning that may take so many tokens: behind the last of them, what ends it has to follow.

Watches ids for the marks around reasoning; knows nothing of text, and hands everything else to
what the answer has to follow anyway, if anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotset.core.request import FREE_FOR_EVER, TokenMatcher


class ThoughtBudget:
    """A `TokenMatcher` of one answer.

    Args:
        most: tokens of reasoning, the marks around it not counted.
        begin: ids of the mark before it; empty where the prompt has opened it.
        end: ids of the mark behind it.
        inner: what the answer has to follow besides.
    """

    def __init__(
        self, most: int, *, begin: Sequence[int], end: Sequence[int], inner: TokenMatcher | None
    ) -> None:
        assert most > 0 and end
        self._most, self._begin, self._end = most, list(begin), list(end)
        self._inner = inner
        self._ids: list[int] = []
        self._is_open = True  # it has not ended, and may still begin

    @property
    def is_complete(self) -> bool:
        """See `TokenMatcher`."""
        return self._inner is not None and self._inner.is_complete

    @property
    def num_free(self) -> int:
        """See `TokenMatcher`."""
        if self._inner is not None:
            return self._inner.num_free if not self._is_open else 0
        return self._left if self._is_open else FREE_FOR_EVER

    def fill_mask(self, words_W: NDArray[np.int32]) -> None:
        """See `TokenMatcher`."""
        if self._is_open and self._left == 0:
            words_W.fill(0)
            token = self._end[self._num_begun_to_end()]
            words_W.view(np.uint32)[token // 32] = np.uint32(1 << token % 32)
        elif self._inner is not None:
            self._inner.fill_mask(words_W)
        else:
            words_W.fill(-1)

    def accept(self, token_id: int) -> None:
        """See `TokenMatcher`."""
        if self._inner is not None:
            self._inner.accept(token_id)
        if not self._is_open:
            return
        self._ids.append(token_id)
        begun = self._ids[: len(self._begin)]
        if begun != self._begin[: len(begun)]:
            self._is_open = False  # the answer begins with something else
        elif len(self._ids) >= len(self._begin) + len(self._end):
            self._is_open = self._ids[-len(self._end) :] != self._end

    @property
    def _left(self) -> int:
        """Tokens of reasoning that may follow, if it has not ended."""
        num_thought = max(0, len(self._ids) - len(self._begin))
        return max(0, self._most - num_thought)

    def _num_begun_to_end(self) -> int:
        """Ids of the mark behind it that the answer ends with already."""
        return next(n for n in range(len(self._end) - 1, -1, -1) if self._ends_with(n))

    def _ends_with(self, num_ids: int) -> bool:
        thought = self._ids[len(self._begin) :]
        return num_ids <= len(thought) and thought[len(thought) - num_ids :] == self._end[:num_ids]
