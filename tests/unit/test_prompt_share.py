"""Time between a prompt and the answers beside it, on a clock that only these two move."""

from __future__ import annotations

import pytest

from hotset.runtime.prompt_share import PromptShare


def served(share: float, *, layer: float, step: float, num_layers: int = 2000) -> float:
    """Share of the time that a prompt of many layers got, decode steps served when due."""
    account, decoded = PromptShare(share), 0.0
    for _ in range(num_layers):
        account.prompt_ran(layer)
        while account.step_is_due:
            account.step_ran(step)
            decoded += step
    return num_layers * layer / (num_layers * layer + decoded)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
@pytest.mark.parametrize(("layer", "step"), [(1.0, 3.0), (3.0, 1.0), (0.01, 1.0)])
def test_a_prompt_gets_its_share(share: float, layer: float, step: float) -> None:
    """Within half a step, which is what may still be owed at the end, or had too much, and the
    first, which is served as soon as anything is owed because nobody knows how long it takes."""
    num_layers = 2000
    total = num_layers * layer / share
    assert served(share, layer=layer, step=step) == pytest.approx(share, abs=1.5 * step / total)


def test_answers_beside_a_short_prompt_lose_no_step_to_rounding() -> None:
    """A prompt of 8 layers that takes as long as 4 steps: 4 steps beside it, and not 3."""
    account = PromptShare(0.5)
    account.step_ran(2.0)
    account.forgive()
    account.prompt_begins()
    steps = 0
    for _ in range(8):
        account.prompt_ran(0.95)
        while account.step_is_due:
            account.step_ran(2.0)
            steps += 1
    assert steps == 4


def test_a_prompt_that_gets_all_lets_answers_wait() -> None:
    assert served(1.0, layer=1.0, step=0.1) == 1.0


def test_time_that_no_prompt_wanted_is_not_saved_up() -> None:
    account = PromptShare(0.5)
    for _ in range(100):
        account.step_ran(1.0)
    account.prompt_begins()
    account.prompt_ran(1.0)
    assert account.step_is_due, "the prompt cannot take back what nobody used"


def test_nothing_is_owed_to_nobody() -> None:
    account = PromptShare(0.5)
    account.step_ran(1.0)
    account.prompt_ran(10.0)
    account.forgive()
    assert not account.step_is_due
