"""How time is shared between a prompt that is taken in and the answers that are being decoded.

Plain arithmetic on seconds. Answers keep a stated part of the rate that they have by themselves: a
step beside a prompt takes longer than one alone, since both read over the link, so a part of the
time would leave them less. Knows no requests and no device.
"""

from __future__ import annotations

# A step pays back at least this part of its time, so that a prompt gets on however slow steps are.
_LEAST_PAID = 0.1


class PromptShare:
    """The account of one scheduler, in seconds of steps that run alone.

    While a prompt is taken in, every second owes the answers `1 - share` seconds, whether it went
    to the prompt or to a step; a step pays what one alone takes.

    Args:
        share: of their rate that answers give up for a prompt, above 0 to 1; with 1 they wait.
    """

    def __init__(self, share: float) -> None:
        assert 0.0 < share <= 1.0, share
        self._kept = 1.0 - share
        self._owed = 0.0
        self._alone = 0.0  # what a step takes, 0 while that is unknown
        self._paid = 0.0

    def prompt_begins(self) -> None:
        """Time that no prompt wanted is not saved up."""
        self._owed = max(0.0, self._owed)

    def prompt_ran(self, seconds: float) -> None:
        """A prompt has run beside answers."""
        self._owed += seconds * self._kept

    def step_ran(self, seconds: float, *, beside: bool) -> None:
        """A decode step has.

        Args:
            beside: between two layers of a prompt.
        """
        if not beside or self._alone == 0.0:
            self._alone = seconds
        self._paid = max(self._alone - self._kept * seconds, _LEAST_PAID * seconds)
        self._owed -= self._paid

    def forgive(self) -> None:
        """Nobody is being answered."""
        self._owed = 0.0

    @property
    def step_is_due(self) -> bool:
        """Whether more is owed without another step than would be given too much with it; the
        latest one tells what a step pays."""
        return self._owed > 0.0 and self._owed >= self._paid / 2
