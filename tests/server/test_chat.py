"""`/v1/chat/completions` through OpenAI's own client: whole, streamed, asynchronous."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from clients import NAME, Scripted

from hotset.core.request import FinishReason

HELLO: list[Any] = [{"role": "user", "content": "Say hello"}]


def test_a_whole_answer(server: Scripted) -> None:
    done = server.openai().chat.completions.create(model=NAME, messages=HELLO)
    (choice,) = done.choices
    assert choice.message.content == "Hello" and choice.finish_reason == "stop"
    assert done.model == NAME and done.usage is not None
    prompt = server.served.text.encode_chat(HELLO)
    wanted = len(prompt), 5 + server.end_tokens
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == wanted


def test_a_stream_is_the_same_in_pieces(server: Scripted) -> None:
    stream = server.openai().chat.completions.create(model=NAME, messages=HELLO, stream=True)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks), "nobody asked for it"


def test_usage_comes_last_when_it_is_asked_for(server: Scripted) -> None:
    stream = server.openai().chat.completions.create(
        model=NAME, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *_, last = stream
    assert last.choices == [] and last.usage is not None
    assert last.usage.total_tokens == last.usage.prompt_tokens + 5 + server.end_tokens


def test_asynchronous_clients_at_once(server: Scripted) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        pieces = []
        async with await client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": str(number)}], stream=True
        ) as stream:
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")
        return "".join(pieces)

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, number) for number in range(16)))

    # The prompt is said again, without what the template puts around it.
    server.scheduler.script = lambda request: [
        token for token in request.prompt_ids if 4 + ord("0") <= token <= 4 + ord("9")
    ]
    assert asyncio.run(all_of_them()) == [str(number) for number in range(16)]


@pytest.mark.parametrize("stream", [False, True])
def test_length(server: Scripted, stream: bool) -> None:
    """SV-07: both names of the limit."""
    for name in ("max_tokens", "max_completion_tokens"):
        text, reason = ask(server, stream=stream, **{name: 1})
        assert (text, reason) == ("H", "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        ("abc||d", ["||"], "abc"),
        ("abc|x", ["||"], "abc|x"),
        ("one two", ["two", "tw"], "one "),
        ("aab", "ab", "a"),
        ("abab|", ["abac", "b|"], "aba"),
        ("ends with |", ["||"], "ends with |"),
    ],
)
def test_stop_strings(
    server: Scripted, said: str, stop: list[str] | str, text: str, stream: bool
) -> None:
    """SV-01: each byte is a token of its own, so every string spans several."""
    server.say(said)
    assert ask(server, stream=stream, stop=stop) == (text, "stop")


def test_what_a_stop_string_ends_is_not_computed_on(server: Scripted) -> None:
    server.say("ab" * 1000)
    ask(server, stream=True, stop="ba")
    number = server.scheduler.num_submitted
    server.ended()
    assert server.scheduler.reasons_of[number] is FinishReason.CANCELLED


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "limit", "text"),
    [
        ("😀", None, "😀"),
        ("안녕하세요", None, "안녕하세요"),
        ("😀", 2, "\ufffd"),
        (b"a\xffb", None, "a\ufffdb"),
    ],
)
def test_characters_over_tokens(
    server: Scripted, said: str | bytes, limit: int | None, text: str, stream: bool
) -> None:
    """SV-03."""
    server.say(said)
    assert ask(server, stream=stream, max_tokens=limit)[0] == text


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(server: Scripted, stream: bool) -> None:
    """SV-13: each with an index and an end of its own; a seed gives each one of its own."""
    seeds = []
    said = iter([b"one", b"three", b"five"])

    def script(request: Any) -> list[int]:
        seeds.append(request.sampling.seed)
        return [4 + byte for byte in next(said)]

    server.scheduler.script = script
    client = server.openai().chat.completions
    if stream:
        texts, ends = ["", "", ""], []
        for chunk in client.create(model=NAME, messages=HELLO, n=3, seed=7, stream=True):
            choice = chunk.choices[0]
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
        assert sorted(ends) == [0, 1, 2]
    else:
        done = client.create(model=NAME, messages=HELLO, n=3, seed=7)
        texts = [choice.message.content or "" for choice in done.choices]
        assert done.usage is not None and done.usage.completion_tokens == 12
        assert done.usage.prompt_tokens == len(server.served.text.encode_chat(HELLO))
    assert texts == ["one", "three", "five"] and seeds == [7, 8, 9]


def test_logprobs(server: Scripted) -> None:
    server.say("é")
    options: dict[str, Any] = {"model": NAME, "messages": HELLO, "logprobs": True}
    client = server.openai().chat.completions
    (choice,) = client.create(**options, top_logprobs=2).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [token.bytes for token in choice.logprobs.content] == [[0xC3], [0xA9]]
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2, 2]
    assert choice.logprobs.content[0].logprob == -0.5
    streamed = [
        token
        for chunk in client.create(**options, stream=True)
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert [token.bytes for token in streamed] == [[0xC3], [0xA9]]


def test_sampling_reaches_the_engine(server: Scripted) -> None:
    server.openai().chat.completions.create(
        model=NAME,
        messages=HELLO,
        temperature=0.7,
        top_p=0.9,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"70": -5},
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2},
    )
    sampling = server.scheduler.last.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.7, 0.9, 3)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (4, 0.1, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.logit_bias == {70: -5}
    # OpenAI's seeds may be negative; -1 is one like others.
    server.openai().chat.completions.create(model=NAME, messages=HELLO, seed=-1)
    assert server.scheduler.last.sampling.seed == 2**63 - 1


def ask(server: Scripted, *, stream: bool, **options: Any) -> tuple[str, str | None]:
    """Text and finish reason of an answer, whole or put together from its chunks."""
    client = server.openai().chat.completions
    if not stream:
        (choice,) = client.create(model=NAME, messages=HELLO, **options).choices
        return choice.message.content or "", choice.finish_reason
    chunks = list(client.create(model=NAME, messages=HELLO, stream=True, **options))
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert [bool(reason) for reason in reasons] == [False] * (len(chunks) - 1) + [True]
    assert all("\ufffd" not in delta or delta in ("\ufffd", "\ufffdb") for delta in deltas)
    return "".join(deltas), reasons[-1]
