"""Time between a prompt and the answers beside it, on a clock that only these two move."""

from __future__ import annotations

import pytest

from hotset.runtime.prompt_share import PromptShare


def kept(
    share: float, *, layer: float, alone: float, beside: float, num_layers: int = 2000
) -> tuple[float, float]:
    """The part of their rate that answers keep beside a prompt of many layers, and the time.

    Args:
        alone, beside: seconds of a step by itself, and between layers.
    """
    account, steps = PromptShare(share), 0
    account.step_ran(alone, beside=False)
    account.forgive()
    account.prompt_begins()
    for _ in range(num_layers):
        account.prompt_ran(layer)
        while account.step_is_due:
            account.step_ran(beside, beside=True)
            steps += 1
    total = num_layers * layer + steps * beside
    return steps * alone / total, total


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
@pytest.mark.parametrize(("layer", "alone"), [(1.0, 3.0), (3.0, 1.0), (0.01, 1.0)])
@pytest.mark.parametrize("slower", [1.0, 1.2])
def test_answers_keep_their_part_of_the_rate(
    share: float, layer: float, alone: float, slower: float
) -> None:
    """Within half a step, which is what may still be owed at the end, or had too much, and what a
    layer adds while a step is being owed."""
    part, total = kept(share, layer=layer, alone=alone, beside=slower * alone)
    assert part == pytest.approx(1 - share, abs=(alone / 2 + layer) / total + 1e-9)


def test_the_part_holds_where_steps_beside_a_prompt_are_slower() -> None:
    """Half of the time for steps that take 1.4 times as long would be 0.36 of the rate."""
    part, _ = kept(0.5, layer=1.0, alone=1.0, beside=1.4)
    assert part == pytest.approx(0.5, abs=0.001)


def test_a_prompt_gets_on_however_slow_steps_are() -> None:
    """Steps that take three times as long beside it cannot keep half of their rate."""
    part, _ = kept(0.5, layer=1.0, alone=1.0, beside=3.0)
    assert 0.2 < part < 1 / 3


def test_answers_beside_a_short_prompt_lose_no_step_to_rounding() -> None:
    """A prompt of 8 layers that takes as long as 4 steps: 4 steps beside it, and not 3."""
    part, total = kept(0.5, layer=0.95, alone=2.0, beside=2.0, num_layers=8)
    assert part * total / 2.0 == pytest.approx(4)


def test_a_prompt_that_gets_all_lets_answers_wait() -> None:
    assert kept(1.0, layer=1.0, alone=0.1, beside=0.1)[0] == 0.0


def test_time_that_no_prompt_wanted_is_not_saved_up() -> None:
    account = PromptShare(0.5)
    for _ in range(100):
        account.step_ran(1.0, beside=False)
    account.prompt_begins()
    account.prompt_ran(1.0)
    assert account.step_is_due, "the prompt cannot take back what nobody used"


def test_nothing_is_owed_to_nobody() -> None:
    account = PromptShare(0.5)
    account.step_ran(1.0, beside=False)
    account.prompt_ran(10.0)
    account.forgive()
    assert not account.step_is_due
