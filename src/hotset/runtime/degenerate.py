"""Notices an answer that is one token for ever: what broken weights or kernels look like.

Watches ids only. Logits that are no numbers never get this far (`sampling.Draw.require_finite`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise

logger = logging.getLogger(__name__)

# A prompt may well ask for "ha ha ha"; from the first token on, and this often, it hardly does.
NUM_REPEATED = 24


class RepeatedToken:
    """Says once, in a warning, that answers are one token from their first step.

    Broken weights have a token of their own, whatever is asked: at the first answer where the
    prompt has no such token, at the second one, to another prompt, where it has. A prompt that has
    it twice in a row asks to go on like that, and says nothing of the weights.
    """

    def __init__(self) -> None:
        self._said = False
        self._suspects: dict[int, int] = {}  # token -> hash of the prompt that it answered

    def look(self, ids: Sequence[int], num_drawn: int) -> None:
        """Looks at an answer after each token.

        Args:
            ids: prompt and answer.
            num_drawn: ids of the answer.
        """
        if num_drawn != NUM_REPEATED or self._said:
            return
        token, *others = set(ids[-num_drawn:])
        if others or not self._is_suspect(token, ids[:-num_drawn]):
            return
        self._said = True
        logger.warning(
            "an answer repeats token %d from its first step: weights or kernels may be wrong; "
            "`hotset verify MODEL` finds out",
            token,
        )

    def _is_suspect(self, token: int, prompt: Sequence[int]) -> bool:
        if token not in prompt:
            return True
        if any(first == second == token for first, second in pairwise(prompt)):
            return False
        name = hash(tuple(prompt))
        return self._suspects.setdefault(token, name) != name
