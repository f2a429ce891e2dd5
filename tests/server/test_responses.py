"""`/v1/responses` and `/v1/completions` through OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from clients import NAME, Scripted

from hotset.core.request import TokenLogprobs
from hotset.server.ask import TokenInfo
from hotset.server.tokens import plain_logprobs


def test_a_whole_response(server: Scripted) -> None:
    done = server.openai().responses.create(model=NAME, input="Hi", instructions="Be brief")
    assert (done.output_text, done.status, done.error) == ("Hello", "completed", None)
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    assert done.usage is not None
    assert done.usage.input_tokens == len(server.served.text.encode_chat(messages))
    assert done.usage.output_tokens == 5


def test_events_of_a_stream_add_up(server: Scripted) -> None:
    events = list(server.openai().responses.create(model=NAME, input="Hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1]
    assert last.type == "response.completed"
    assert "".join(deltas) == last.response.output_text == "Hello"


def test_the_clients_own_accumulator_agrees(server: Scripted) -> None:
    with server.openai().responses.stream(model=NAME, input="Hi") as stream:
        assert stream.get_final_response().output_text == "Hello"


def test_a_response_that_is_cut_off(server: Scripted) -> None:
    client = server.openai().responses
    done = client.create(model=NAME, input="Hi", max_output_tokens=2)
    *_, last = client.create(model=NAME, input="Hi", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete"
    for response in (done, last.response):
        assert (response.output_text, response.status) == ("He", "incomplete")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"


def test_items_of_a_conversation(server: Scripted) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {"role": "user", "content": "And now?"},
    ]
    done = server.openai().responses.create(model=NAME, input=items)
    plain = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c"},
        {"role": "user", "content": "And now?"},
    ]
    assert done.usage is not None
    assert done.usage.input_tokens == len(server.served.text.encode_chat(plain))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input",
        ),
    ],
)
def test_what_is_refused(server: Scripted, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        server.openai().responses.create(**{"model": NAME, "input": "Hi", **changes})


@pytest.mark.parametrize("prompt", ["Hi", [8, 9], ["Hi"], [[8, 9]]])
def test_a_completion_of_text_or_ids(server: Scripted, prompt: Any) -> None:
    done = server.openai().completions.create(model=NAME, prompt=prompt, max_tokens=20)
    assert [choice.text for choice in done.choices] == ["Hello"]
    ids = server.served.text.encode("Hi") if prompt in ("Hi", ["Hi"]) else [8, 9]
    assert list(server.scheduler.last.prompt_ids) == ids


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices(server: Scripted, stream: bool) -> None:
    server.scheduler.script = lambda request: list(request.prompt_ids)
    options: Any = {"model": NAME, "prompt": [[69, 70], [71]], "n": 2, "max_tokens": 20}
    client = server.openai().completions
    texts = [""] * 4
    if stream:
        *chunks, last = client.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        assert last.choices == [] and last.usage is not None and last.usage.prompt_tokens == 3
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        done = client.create(**options)
        assert done.usage is not None and done.usage.prompt_tokens == 3
        texts = [choice.text for choice in done.choices]
    assert texts == ["AB", "AB", "C", "C"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(server: Scripted, stream: bool) -> None:
    client, options = server.openai().completions, {"model": NAME, "prompt": "x", "logprobs": 1}
    if stream:
        parts = [c.choices[0].logprobs for c in client.create(**options, stream=True)]  # type: ignore[call-overload]
    else:
        parts = [client.create(**options).choices[0].logprobs]  # type: ignore[call-overload]
    known = [part for part in parts if part is not None]
    assert [token for part in known for token in part.tokens] == list("Hello")
    assert [start for part in known for start in part.text_offset] == [0, 1, 2, 3, 4]
    assert [list(top.values()) for part in known for top in part.top_logprobs] == [[-1.0]] * 5


def test_parts_of_a_character_keep_names_of_their_own() -> None:
    """Named by their text alone they would be one, and of two the less likely one."""
    spelling = {1: b"\xc3", 2: b"\xa9", 3: b"e", 4: b"e"}.__getitem__
    logprobs = TokenLogprobs(logprob=-0.5, top=((1, -0.5), (2, -1.0), (3, -1.5), (4, -2.0)))
    columns, end = plain_logprobs([TokenInfo(1, logprobs)], spelling, start=7)
    assert columns["tokens"] == ["bytes:\\xc3"]
    assert columns["top_logprobs"] == [{"bytes:\\xc3": -0.5, "bytes:\\xa9": -1.0, "e": -1.5}]
    assert (columns["text_offset"], end) == ([7], 8)
