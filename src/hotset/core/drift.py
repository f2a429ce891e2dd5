"""Whether the text that is served is like the text that a profile was made of.

Compares the fixed hot set of a profile on live routing with what it promises on its own text, and
with experts chosen blindly. Knows routed ids and counts; nothing of who really owns a slot, so the
figure says what the profile is worth whatever the policy makes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from hotset.core.policy import StaticUniform
from hotset.core.profile import Profile
from hotset.core.slot_pools import IntArray

logger = logging.getLogger(__name__)

WINDOW_TOKENS = 4096
"""Older tokens fade: counts are halved whenever so many have come in."""

LEAST_TOKENS = 256
"""Before so many, nothing is said: a few sentences are no sample of what is served."""


@dataclass(frozen=True)
class DriftReport:
    """Hit rates of the profile's fixed hot set.

    Attributes:
        expected: on the profile's own text.
        seen: on the text that is served; 0 before there is any.
        blind: of as many experts chosen blindly.
        num_tokens: that `seen` is of, older ones counting less.
    """

    expected: float
    seen: float
    blind: float
    num_tokens: float

    @property
    def is_worse_than_none(self) -> bool:
        return self.num_tokens >= LEAST_TOKENS and self.seen < self.blind


class Drift:
    """Watches the steps of an engine (`runtime.steps.Watcher`).

    Args:
        profile: of this model.
        slots_per_layer: that the hot set would have.
    """

    def __init__(self, profile: Profile, slots_per_layer: IntArray) -> None:
        num_experts = np.array(profile.fingerprint.num_experts)
        top_k = np.array(profile.fingerprint.top_k)
        policy = StaticUniform(num_experts.tolist(), prior_LE=profile.prior)
        hot_LE = policy.best_experts(slots_per_layer)
        # One column more, which no id of an expert hits, for padding.
        self._hot_LE = np.pad(hot_LE, ((0, 0), (0, 1)))
        self._rows = np.arange(len(num_experts))[:, None]
        counts = profile.counts_LE
        self._expected = float((counts * hot_LE).sum() / max(1, counts.sum()))
        self._uses_per_token = int(top_k.sum())
        blind = (top_k * np.asarray(slots_per_layer) / num_experts).sum()
        self._blind = float(blind / self._uses_per_token)
        self._hits = self._uses = 0.0
        self._warned = False

    def step(self, ids_LN: IntArray, owners: Sequence[tuple[Hashable, int]]) -> None:
        """Takes in what a step routed; see `runtime.steps.Watcher`."""
        if not owners:
            return
        ids = np.where(ids_LN < 0, self._hot_LE.shape[1] - 1, ids_LN)
        self._hits += float(np.count_nonzero(self._hot_LE[self._rows, ids]))
        self._uses += float(np.count_nonzero(ids_LN >= 0))
        if self._uses > WINDOW_TOKENS * self._uses_per_token:
            self._hits, self._uses = self._hits / 2, self._uses / 2
        self._warn_once()

    def end(self, owner: Hashable) -> None:
        """Sequences make no difference here."""

    def report(self) -> DriftReport:
        """The figures as of the latest step."""
        return DriftReport(
            expected=self._expected,
            seen=self._hits / self._uses if self._uses else 0.0,
            blind=self._blind,
            num_tokens=self._uses / self._uses_per_token,
        )

    def _warn_once(self) -> None:
        report = self.report()
        if report.is_worse_than_none and not self._warned:
            self._warned = True
            logger.warning(
                "the profile is worse than none on this text: its hot set hits %.3f, it promises "
                "%.3f, and experts chosen blindly hit %.3f; make one of such text with "
                "`hotset profile`, or leave it out",
                report.seen,
                report.expected,
                report.blind,
            )
