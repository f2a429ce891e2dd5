"""How time is shared between a prompt that is taken in and the answers that are being decoded.

Plain arithmetic on seconds: what prompts have taken while others were being answered is owed to
these, up to the share that was stated. Knows no requests and no device.
"""

from __future__ import annotations


class PromptShare:
    """The account of one scheduler.

    Args:
        share: of the time that a prompt gets, above 0 to 1; with 1 answers wait for it.
    """

    def __init__(self, share: float) -> None:
        assert 0.0 < share <= 1.0, share
        self._owed_per_second = (1.0 - share) / share
        self._owed = 0.0
        self._step = 0.0

    def prompt_begins(self) -> None:
        """Time that no prompt wanted is not saved up."""
        self._owed = max(0.0, self._owed)

    def prompt_ran(self, seconds: float) -> None:
        """A prompt has run beside answers."""
        self._owed += seconds * self._owed_per_second

    def step_ran(self, seconds: float) -> None:
        """A decode step has."""
        self._step = seconds
        self._owed -= seconds

    def forgive(self) -> None:
        """Nobody is being answered."""
        self._owed = 0.0

    @property
    def step_is_due(self) -> bool:
        """Whether more is owed without another step than would be given too much with it; the
        latest one tells how long a step is."""
        return self._owed > 0.0 and self._owed >= self._step / 2
