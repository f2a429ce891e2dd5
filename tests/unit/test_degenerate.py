"""An answer that is one token for ever is noticed, once."""

from __future__ import annotations

import logging

import pytest

from hotset.runtime.degenerate import NUM_REPEATED, RepeatedToken


def answer(watch: RepeatedToken, drawn: list[int]) -> None:
    prompt = [5, 6]
    for count in range(1, len(drawn) + 1):
        watch.look(prompt + drawn[:count], count)


def test_one_token_from_the_first_step_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = RepeatedToken()
    with caplog.at_level(logging.WARNING):
        answer(watch, [7] * (2 * NUM_REPEATED))
        answer(watch, [8] * NUM_REPEATED)
    (record,) = caplog.records
    assert "repeats token 7 from its first step" in record.getMessage()
    assert "`hotset verify MODEL`" in record.getMessage()


@pytest.mark.parametrize(
    "drawn",
    [
        [7] * (NUM_REPEATED - 1),
        [1] + [7] * (2 * NUM_REPEATED),
        [6] * (2 * NUM_REPEATED),  # the prompt has it
        [7] * (NUM_REPEATED - 1) + [8] + [7] * NUM_REPEATED,
    ],
)
def test_other_answers_are_left_alone(drawn: list[int], caplog: pytest.LogCaptureFixture) -> None:
    answer(RepeatedToken(), drawn)
    assert not caplog.records
