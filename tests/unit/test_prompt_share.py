"""Time between a prompt and the answers beside it, on a clock that only these two move."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from hotset.runtime.prompt_share import PromptShare


@dataclass
class Machine:
    """A prompt and answers by one account, which is told of all the time that goes by.

    Attributes:
        alone, beside: seconds of a step by itself, and between pieces of a prompt.
        between: that the host takes behind each step, which no device knows of.
        queued: pieces of the prompt that the device may be behind.
    """

    share: float
    alone: float
    beside: float
    between: float = 0.0
    queued: int = 0
    now: float = 0.0
    steps: list[float] = field(default_factory=list)  # when each ended

    def __post_init__(self) -> None:
        self.account, self._told = PromptShare(self.share), 0.0

    def _lap(self) -> float:
        self._told, since = self.now, self._told
        return self.now - since

    def step(self, *, beside: bool) -> None:
        self.now += self.beside if beside else self.alone
        self.steps.append(self.now)
        self.account.step_ran(self._lap(), num_rows=7, beside=beside)
        self.now += self.between

    def prompt(self, pieces: list[float]) -> tuple[float, float]:
        """When it began and ended; behind its last piece nobody has a turn."""
        self._lap()
        began = self.now
        self.account.prompt_begins()
        for seconds in pieces[:-1]:
            self.now += seconds
            self.account.prompt_ran(self._lap())
            self.account.piece_ended()
            while self.account.step_is_due(num_pieces=1 + self.queued):
                self.step(beside=True)
        self.now += pieces[-1]
        self.account.prompt_ran(self._lap())
        return began, self.now

    def kept(self, began: float, ended: float) -> float:
        """The part of the rate that they had alone, with what the host takes then too."""
        num_steps = sum(began < at <= ended for at in self.steps)
        return num_steps * (self.alone + self.between) / (ended - began)


def machine(share: float, **values: float) -> Machine:
    """Answers have been decoded for a while."""
    one = Machine(share, **values)  # type: ignore[arg-type]
    for _ in range(8):
        one.step(beside=False)
    return one


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.8])
@pytest.mark.parametrize(("piece", "alone"), [(1.0, 3.0), (3.0, 1.0), (0.01, 1.0)])
@pytest.mark.parametrize("slower", [1.0, 1.05])
@pytest.mark.parametrize("between", [0.0, 0.1])
def test_answers_keep_their_part_of_the_rate_and_the_prompt_gets_the_rest(
    share: float, piece: float, alone: float, slower: float, between: float
) -> None:
    """Never less over the whole prompt; more by less than 1%, as there are 2,000 pieces and it may
    be a step and a piece too much. Steps with the least share are the least slowed down."""
    one = machine(share, alone=alone, beside=slower * alone, between=between * alone)
    slowest = 1 - 0.8 * share  # of what a step alone takes, that one beside it may owe
    if (1 - share) * (slower + between) / (1 + between) > slowest:
        pytest.skip("steps this slow cannot keep so much, see the test of slow ones")
    began, ended = one.prompt([piece] * 2000)
    too_much = (one.alone + one.between + 2 * piece) / (ended - began)
    assert 1 - share <= one.kept(began, ended) <= 1 - share + too_much + 1e-9


@pytest.mark.parametrize("num_pieces", [2, 8, 48])
@pytest.mark.parametrize("queued", [0, 1])
@pytest.mark.parametrize("beside", [2.0, 2.8])
def test_the_part_is_a_floor_for_a_prompt_of_few_steps(
    num_pieces: int, queued: int, beside: float
) -> None:
    """Seven steps' time, as 8,192 tokens beside seven streams: no rounding below the part, and one
    step more than it at most. What the host takes behind steps counts."""
    one = machine(0.5, alone=2.0, beside=beside, between=0.2, queued=queued)
    began, ended = one.prompt([14.0 / num_pieces] * num_pieces)
    too_much = (2.2 + 14.0 / num_pieces * (1 + queued)) / (ended - began)
    assert 0.5 <= one.kept(began, ended) <= 0.5 + too_much


def test_in_any_window_the_part_holds_up_to_a_step_and_a_piece() -> None:
    one = machine(0.5, alone=0.09, beside=0.12, between=0.01)
    began, ended = one.prompt([0.02] * 1000)
    period, window = 0.1, 1.0
    start = began
    while start + window < ended:
        num_steps = sum(start < at <= start + window for at in one.steps)
        assert num_steps >= 0.5 * window / period - 1 - 0.02 / period - 1e-9
        start += 0.013


def test_the_part_holds_where_steps_beside_a_prompt_are_slower() -> None:
    """Half of the time for steps that take 1.4 times as long would be 0.36 of the rate."""
    one = machine(0.5, alone=1.0, beside=1.4)
    assert one.kept(*one.prompt([1.0] * 2000)) == pytest.approx(0.5, abs=0.001)


def test_a_prompt_gets_on_however_slow_steps_are() -> None:
    """Steps that take three times as long beside it cannot keep half of their rate."""
    one = machine(0.5, alone=1.0, beside=3.0)
    began, ended = one.prompt([1.0] * 2000)
    assert 0.2 < one.kept(began, ended) < 1 / 3
    assert 2000 / (ended - began) > 0.1


def test_a_step_that_was_held_up_says_nothing_of_the_others() -> None:
    one = Machine(0.5, alone=1.0, beside=1.0)
    for held_up in (0.0, 0.0, 20.0, 0.0):
        one.now += held_up
        one.step(beside=False)
    assert one.kept(*one.prompt([1.0] * 200)) == pytest.approx(0.5, abs=0.01)


def test_steps_of_more_rows_than_were_seen_alone_are_known_by_those_beside() -> None:
    """By a row's time of 1 second, steps of eight rows that take 5 would get nearly all of it."""
    account = PromptShare(0.5)
    account.step_ran(1.0, num_rows=1, beside=False)
    account.prompt_begins()
    steps = 0
    for _ in range(1000):
        account.prompt_ran(1.0)
        account.piece_ended()
        while account.step_is_due(num_pieces=1):
            account.step_ran(5.0, num_rows=8, beside=True)
            steps += 1
    assert 1000 / (1000 + 5 * steps) == pytest.approx(0.5, abs=0.01)


def test_a_prompt_that_gets_all_lets_answers_wait() -> None:
    one = machine(1.0, alone=0.1, beside=0.1)
    assert one.kept(*one.prompt([1.0] * 100)) == 0.0


def test_time_that_no_prompt_wanted_is_not_saved_up() -> None:
    one = machine(0.5, alone=1.0, beside=1.0)
    one.account.prompt_begins()
    one.account.prompt_ran(1.0)
    assert one.account.step_is_due(), "the prompt cannot take back what nobody used"


def test_of_short_prompts_one_after_the_other_answers_have_their_part() -> None:
    """Each is one piece; a step between them pays for as many as it is worth."""
    one, begin = machine(0.5, alone=1.0, beside=1.0), None
    for _ in range(1000):
        while one.account.step_is_due():
            one.step(beside=False)
        at, ended = one.prompt([0.1])
        begin = at if begin is None else begin
    assert one.kept(begin, ended) == pytest.approx(0.5, abs=0.01)


def test_nothing_is_owed_to_nobody() -> None:
    one = machine(0.5, alone=1.0, beside=1.0)
    one.account.prompt_ran(10.0)
    one.account.forgive()
    assert not one.account.step_is_due()
