"""An answer that is one token for ever is noticed, once."""

from __future__ import annotations

import logging

import pytest

from hotset.runtime.degenerate import NUM_REPEATED, RepeatedToken


def answer(watch: RepeatedToken, drawn: list[int], prompt: tuple[int, ...] = (5, 6)) -> None:
    for count in range(1, len(drawn) + 1):
        watch.look([*prompt, *drawn[:count]], count)


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
        [6] * (2 * NUM_REPEATED),  # the prompt has it: it may have asked for that
        [7] * (NUM_REPEATED - 1) + [8] + [7] * NUM_REPEATED,
    ],
)
def test_other_answers_are_left_alone(drawn: list[int], caplog: pytest.LogCaptureFixture) -> None:
    answer(RepeatedToken(), drawn)
    assert not caplog.records


def test_one_token_whatever_is_asked_is_said_though_the_prompts_have_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A mark of the chat template, say."""
    watch = RepeatedToken()
    answer(watch, [6] * NUM_REPEATED)
    answer(watch, [6] * NUM_REPEATED)
    assert not caplog.records, "the same prompt has the same answer"
    answer(watch, [5] * NUM_REPEATED, prompt=(7, 5))
    assert not caplog.records, "another token"
    answer(watch, [6] * NUM_REPEATED, prompt=(7, 6))
    assert "repeats token 6" in caplog.text


def test_a_prompt_that_repeats_itself_may_be_continued(caplog: pytest.LogCaptureFixture) -> None:
    watch = RepeatedToken()
    for first in range(3):
        answer(watch, [6] * NUM_REPEATED, prompt=(first, 6, 6, 6))
    assert not caplog.records
