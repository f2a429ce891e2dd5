"""How time is shared between a prompt that is taken in and the answers that are being decoded.

Plain arithmetic on seconds of a wall clock. Answers keep at least a stated part of the rate that
they have by themselves: a step beside a prompt takes longer than one alone, since both read over
the link, so a part of the time would leave them less. Knows no requests and no device.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# A step pays back at least this part of what one that is not slowed down would, so that a prompt
# gets on however slow steps beside it are.
_LEAST_PAID = 0.2
# Of the latest steps the median counts: their times differ by what they miss, and one that the
# machine held up says nothing of the others.
_NUM_STEPS = 32


class PromptShare:
    """The account of one scheduler, in seconds of steps that run alone.

    While a prompt is taken in every second owes the answers `1 - share` seconds, whatever it was
    spent on; a step pays what one alone takes. So nothing owed means the part of the rate, however
    much time goes by between a step's end and the next thing that is counted.

    Args:
        share: of their rate that answers give up for a prompt, above 0 to 1; with 1 they wait.
    """

    def __init__(self, share: float) -> None:
        assert 0.0 < share <= 1.0, share
        self._kept, self._share = 1.0 - share, share
        self._owed = 0.0
        self._alone = _StepTimes()
        self._beside = _StepTimes()
        self._prompt_seconds, self._num_pieces = 0.0, 0

    def prompt_begins(self) -> None:
        """The pieces of another prompt say nothing of this one's."""
        self._prompt_seconds, self._num_pieces = 0.0, 0

    def prompt_ran(self, seconds: float) -> None:
        """A prompt has run beside answers."""
        self._owed += seconds * self._kept
        self._prompt_seconds += seconds

    def piece_ended(self) -> None:
        """The prompt has come to the next place at which steps may run."""
        self._num_pieces += 1

    def step_ran(self, seconds: float, *, num_rows: int, beside: bool) -> None:
        """A decode step has.

        Args:
            seconds: since what was counted before.
            beside: between two pieces of a prompt.
        """
        (self._beside if beside else self._alone).add(seconds, num_rows)
        if beside or self._owed > 0.0:
            least = _LEAST_PAID * self._share * seconds
            self._owed -= max(self._alone_seconds(num_rows) - self._kept * seconds, least)
        else:  # what no prompt wanted is not saved up
            self._owed = 0.0

    def forgive(self) -> None:
        """Nobody is being answered."""
        self._owed = 0.0

    def step_is_due(self, *, num_pieces: int = 0) -> bool:
        """Whether less than the part is kept without another step.

        Args:
            num_pieces: of the prompt, that run before answers have their turn again; they are as
                long as those before them.
        """
        piece = self._prompt_seconds / self._num_pieces if self._num_pieces else 0.0
        return self._owed + num_pieces * piece * self._kept > 0.0

    def _alone_seconds(self, num_rows: int) -> float:
        """What a step takes alone. Of fewer rows than there were before, what they had then; of
        more, what one takes beside a prompt, until they have been seen alone."""
        known = self._alone if num_rows <= self._alone.num_rows else self._beside
        return known.median()


class _StepTimes:
    """Seconds of the latest steps of so many rows.

    Attributes:
        num_rows: of all of them; 0 while there are none.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)

    def add(self, seconds: float, num_rows: int) -> None:
        if num_rows != self.num_rows:
            self._seconds.clear()
        self.num_rows = num_rows
        self._seconds.append(seconds)

    def median(self) -> float:
        return median(self._seconds)
