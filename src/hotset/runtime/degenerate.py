"""Notices an answer that is one token for ever: what broken weights or kernels look like.

Watches ids only. Logits that are no numbers never get this far (`sampling.Draw.require_finite`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

# A prompt may well ask for "ha ha ha"; from the first token on, and this often, it hardly does.
NUM_REPEATED = 24


class RepeatedToken:
    """Says once, in a warning, that an answer has been one token from its first step.

    A token that its prompt has too is left alone: small models go on with what they read, while
    broken weights have a token of their own, whatever is asked.
    """

    def __init__(self) -> None:
        self._said = False

    def look(self, ids: Sequence[int], num_drawn: int) -> None:
        """Looks at an answer after each token.

        Args:
            ids: prompt and answer.
            num_drawn: ids of the answer.
        """
        if num_drawn != NUM_REPEATED or self._said:
            return
        drawn = set(ids[-num_drawn:])
        if len(drawn) == 1 and not drawn & set(ids[:-num_drawn]):
            self._said = True
            logger.warning(
                "an answer repeats token %d from its first step: weights or kernels may be wrong; "
                "`hotset verify MODEL` finds out",
                *drawn,
            )
