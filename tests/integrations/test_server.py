"""What the `openai` client gets from `hotset serve --engine vllm`: vLLM's server, hotset's experts.

Plain completions of the model that is in the package; the rest of the protocol is asked for in
`test_client_suite.py`, of a server whose answers are known.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_process import free_port, listening

PROMPT = "The history of the city"
NAME = "pocket"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one server, a process as a user starts it; greedy answers are independent
    of each other up to the order of sums in FP32."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed (requirements-vllm.txt)")
    port = free_port()
    command = [str(Path(sys.executable).with_name("hotset")), "serve", NAME, "--engine", "vllm"]
    command += ["--device", "cpu", "--dtype", "float32", "--vram", "120MiB", "--context", "256"]
    command += ["--max-batch", "4", "--port", str(port), "--no-graphs"]
    log = tmp_path_factory.mktemp("server") / "log"
    with listening(command, port=port, log=log) as address:
        yield f"{address}/v1"


def complete(url: str, **options: object) -> object:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    settings = {"model": NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 0} | options
    return client.completions.create(**settings)  # type: ignore[call-overload]


def test_the_model_is_listed_by_its_name(url: str) -> None:
    import openai

    listed = openai.OpenAI(base_url=url, api_key="none").models.list()
    assert [one.id for one in listed] == [NAME]


def test_a_whole_answer(url: str) -> None:
    answer = complete(url)
    assert answer.choices[0].text and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_a_stream_is_the_same_in_pieces_and_ends_with_usage(url: str) -> None:
    whole = complete(url)
    *pieces, last = complete(url, stream=True, stream_options={"include_usage": True})
    assert "".join(one.choices[0].text for one in pieces) == whole.choices[0].text
    assert not last.choices and last.usage.completion_tokens == 8


def test_a_stop_string_ends_an_answer_before_itself(url: str) -> None:
    text = complete(url).choices[0].text
    stop = text[len(text) // 2 :][:2]
    answer = complete(url, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text[: text.index(stop)]


def test_several_choices(url: str) -> None:
    answer = complete(url, n=3, temperature=1.0, seed=5)
    assert [one.index for one in answer.choices] == [0, 1, 2]


def test_logprobs(url: str) -> None:
    found = complete(url, logprobs=2).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == 8
    assert all(-100 < one <= 0 for one in found.token_logprobs)
    for chosen, best in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert chosen == max(best.values()), "greedy takes the best"


def test_asynchronous_clients_at_once(url: str) -> None:
    import openai

    whole = complete(url).choices[0].text

    async def ask_all() -> list[str]:
        client = openai.AsyncOpenAI(base_url=url, api_key="none")
        asked = [
            client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, temperature=0)
            for _ in range(6)
        ]
        return [one.choices[0].text for one in await asyncio.gather(*asked)]

    assert asyncio.run(ask_all()) == [whole] * 6


def test_errors_have_the_clients_types(url: str) -> None:
    import openai

    with pytest.raises(openai.NotFoundError):
        complete(url, model="another")
    with pytest.raises(openai.BadRequestError):
        complete(url, max_tokens=100_000)
    with pytest.raises(openai.BadRequestError):
        complete(url, temperature=-1)
