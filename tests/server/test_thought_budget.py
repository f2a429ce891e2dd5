"""Reasoning ends at its budget, in one token or in several, and everything else stays free."""

from __future__ import annotations

from collections.abc import Sequence

import httpx2
import numpy as np
import pytest
import torch
from clients import NAME, Scripted
from test_parsers import HARMONY

from hotset.core.request import FREE_FOR_EVER, TokenMatcher
from hotset.kernels.sample_adjust_reference import num_words, unpack_mask
from hotset.runtime.text import Text
from hotset.server.ask import Ask
from hotset.server.forced import make_matcher
from hotset.server.thought_budget import ThoughtBudget
from vocabulary import BYTE_VOCAB, byte_ids

VOCAB = 40
HELLO = [{"role": "user", "content": "hi"}]


def allowed(matcher: TokenMatcher, vocab: int = VOCAB) -> list[int]:
    words_W = np.zeros(num_words(vocab), dtype=np.int32)
    matcher.fill_mask(words_W)
    return torch.nonzero(unpack_mask(torch.from_numpy(words_W)[None], vocab)[0]).flatten().tolist()


def follow(matcher: TokenMatcher, wishes: Sequence[int]) -> list[int]:
    """What is drawn by a model that wishes for these, and takes what it must."""
    drawn = []
    for wish in wishes:
        may = allowed(matcher)
        drawn.append(wish if wish in may else may[0])
        # What is called free is.
        assert len(may) == VOCAB or matcher.num_free == 0
        matcher.accept(drawn[-1])
    return drawn


@pytest.mark.parametrize("token", [31, 32, 33])  # around the end of a mask's word
def test_the_mark_follows_the_last_token_of_the_budget(token: int) -> None:
    matcher = ThoughtBudget(3, begin=[1], end=[token], inner=None)
    assert follow(matcher, [1, 5, 6, 7, 8, 9, 1]) == [1, 5, 6, 7, token, 9, 1]
    assert matcher.num_free == FREE_FOR_EVER and not matcher.is_complete


@pytest.mark.parametrize(
    ("begin", "wishes"),
    [
        ([1], [1, 5, 2, 7, 8, 9]),  # it ends by itself
        ([1], [5, 6, 7, 8, 9]),  # there is none
        ([], [5, 6, 2, 8, 9]),  # the prompt has opened it
        ([1, 3], [1, 4, 6, 7, 8, 9]),  # it begins like a mark
    ],
)
def test_what_stays_within_is_left_alone(begin: list[int], wishes: list[int]) -> None:
    assert follow(ThoughtBudget(3, begin=begin, end=[2], inner=None), wishes) == wishes


def test_a_mark_of_several_tokens_goes_on_where_the_answer_has_begun_it() -> None:
    def drawn(wishes: list[int]) -> list[int]:
        return follow(ThoughtBudget(3, begin=[], end=[2, 3, 2, 4], inner=None), wishes)

    assert drawn([5, 6, 7, 9, 9, 9, 9, 8]) == [5, 6, 7, 2, 3, 2, 4, 8]
    assert drawn([5, 2, 3, 9, 9, 8]) == [5, 2, 3, 2, 4, 8]
    assert drawn([5, 6, 2, 9, 9, 9, 8]) == [5, 6, 2, 3, 2, 4, 8]


class OnlyEven:
    """A structure: even ids, six of them."""

    num_free = 0

    def __init__(self) -> None:
        self.taken: list[int] = []

    @property
    def is_complete(self) -> bool:
        return len(self.taken) == 6

    def fill_mask(self, words_W: np.ndarray) -> None:
        words_W.fill(0x55555555)

    def accept(self, token_id: int) -> None:
        self.taken.append(token_id)


def test_a_structure_holds_around_it() -> None:
    inner = OnlyEven()
    matcher = ThoughtBudget(2, begin=[], end=[2], inner=inner)
    drawn = []
    for wish in (8, 6, 4, 12, 10):
        may = allowed(matcher)
        drawn.append(wish if wish in may else may[0])
        matcher.accept(drawn[-1])
    assert drawn == [8, 6, 2, 12, 10] == inner.taken
    assert allowed(matcher) == list(range(0, VOCAB, 2)) and matcher.num_free == 0
    matcher.accept(0)
    assert matcher.is_complete


@pytest.mark.parametrize(
    ("template", "prompt", "answer", "end"),
    [
        ("<think> <tool_call>", "", "<think>abcdef", "</think>"),
        ("<think> <tool_call>", "<think>\n", "abcdef", "</think>"),
        (HARMONY, "", "<|channel|>analysis<|message|>abcdef", "<|end|><|start|>assistant"),
    ],
)
def test_marks_are_those_of_the_models_template(
    byte_text: Text,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    prompt: str,
    answer: str,
    end: str,
) -> None:
    monkeypatch.setattr(Text, "chat_template", template)
    matcher = make_matcher(byte_text, Ask(messages=HELLO, most_thought=6), byte_ids(prompt))
    assert matcher is not None
    for token in byte_ids(answer):
        assert len(allowed(matcher, BYTE_VOCAB)) == BYTE_VOCAB
        matcher.accept(token)
    for token in byte_ids(end):
        assert allowed(matcher, BYTE_VOCAB) == [token]
        matcher.accept(token)
    assert len(allowed(matcher, BYTE_VOCAB)) == BYTE_VOCAB


def test_models_that_are_not_known_to_reason_have_nothing_to_limit(
    byte_text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Text, "chat_template", "{{ messages }}")
    assert make_matcher(byte_text, Ask(messages=HELLO, most_thought=6), []) is None


@pytest.mark.parametrize(
    ("template", "takes_it"), [("<think> <tool_call>", True), ("<tool_call>", False)]
)
def test_thinking_is_refused_where_a_model_knows_none(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, template: str, takes_it: bool
) -> None:
    """A model without a switch that reasons anyway does what was asked."""
    monkeypatch.setattr(Text, "chat_template", template)
    asked = {"model": NAME, "messages": HELLO, "max_tokens": 9}
    answer = httpx2.post(
        f"{server.url}/v1/messages",
        json={**asked, "thinking": {"type": "enabled", "budget_tokens": 8}},
    )
    assert (answer.status_code == 200) is takes_it, answer.text
    if takes_it:
        assert isinstance(server.scheduler.last.matcher, ThoughtBudget)
    else:
        assert "knows no thinking" in answer.json()["error"]["message"]
