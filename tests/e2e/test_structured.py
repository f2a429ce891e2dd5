"""What a request asks of sampling, through a loaded model and its scheduler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import hotset
from hotset.core.request import FinishReason, SamplingParams
from hotset.runtime.requests import Event, Request
from hotset.server.thought_budget import ThoughtBudget

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "sad"]}, "n": {"type": "integer", "maximum": 9}},
    "required": ["mood", "n"],
    "additionalProperties": False,
}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def model() -> Iterator[hotset.api.Model]:
    with hotset.load("pocket", device="cpu", context=256, max_batch=2) as loaded:
        yield loaded


def answers(model: Any, *requests: Request) -> list[list[Event]]:
    """Events of each request, answered together."""
    with model.engine.scheduling(max_waiting=8) as scheduler:
        numbers = [scheduler.submit(request) for request in requests]
        events: dict[int, list[Event]] = {number: [] for number in numbers}
        while any(not own or own[-1].finish_reason is None for own in events.values()):
            for event in scheduler.step():
                events[event.request_id].append(event)
    return [events[number] for number in numbers]


def request(model: Any, *, max_tokens: int = 60, matcher: Any = None, **asked: Any) -> Request:
    return Request(
        prompt_ids=model.text.encode(PROMPT),
        max_tokens=max_tokens,
        sampling=SamplingParams(**asked),
        stop_ids=model.engine.stop_ids,
        matcher=matcher,
    )


def ids(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def test_a_schema_holds_beside_an_answer_that_is_free(model: Any) -> None:
    matcher = model.text.grammars.json_schema(SCHEMA)
    bound, free = answers(model, request(model, matcher=matcher), request(model))
    answer = json.loads(model.text.decode(ids(bound)))
    assert answer["mood"] in ("glad", "sad") and answer["n"] <= 9
    assert bound[-1].finish_reason is FinishReason.STOP
    (alone,) = answers(model, request(model))
    assert ids(free) == ids(alone), "a neighbour's mask is not its own"
    assert ids(free) != ids(bound), "control"


def test_reasoning_ends_at_its_budget_and_the_answer_goes_on(model: Any) -> None:
    (free,) = answers(model, request(model, max_tokens=24))
    mark = ThoughtBudget(10, begin=[], end=[9, 8], inner=None)
    cut, beside = answers(
        model,
        request(model, max_tokens=24, matcher=mark),
        request(model, max_tokens=24, matcher=ThoughtBudget(10, begin=[9], end=[8], inner=None)),
    )
    assert ids(free)[10:12] != [9, 8], "control"
    assert ids(cut)[:12] == [*ids(free)[:10], 9, 8] and len(ids(cut)) == 24
    assert ids(beside) == ids(free), "an answer that does not reason has nothing to end"


def test_logprobs_bias_and_penalties_reach_the_answer(model: Any) -> None:
    plain, told, biased, penal = (
        answers(model, request(model, max_tokens=8, **asked))[0]
        for asked in ({}, {"logprobs": 3}, {"logit_bias": {7: 100.0}}, {"frequency_penalty": 2.0})
    )
    assert ids(told) == ids(plain), "telling changes nothing"
    for event in told:
        assert event.logprobs is not None and len(event.logprobs.top) == 3
        # Greedy: the token is the likeliest, and probabilities fall.
        assert event.logprobs.top[0] == (event.token_id, event.logprobs.logprob)
        values = [value for _, value in event.logprobs.top]
        assert values == sorted(values, reverse=True) and values[0] <= 0
    assert all(event.logprobs is None for event in plain)
    assert ids(biased) == [7] * 8
    repeats = len(ids(plain)) - len(set(ids(plain)))
    assert len(ids(penal)) - len(set(ids(penal))) <= repeats
