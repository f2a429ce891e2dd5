"""A server over a real engine: pocket in FP32 on a CPU, answers independent of each other."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import schemathesis
from clients import wait_until
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from scripted import running
from traffic import Outcomes, rough_traffic

from hotset.core.config import EngineConfig
from hotset.core.request import FinishReason
from hotset.runtime.engine import Engine
from hotset.runtime.weights import CheckpointWeights
from hotset.server.config import ServerConfig
from hotset.server.served import Served

PROMPTS = [
    f"{start} {number}"
    for number in range(4)
    for start in ("The history of the city", "A recipe for", "She said that", "In winter")
]


class Pocket:
    """The running server.

    Attributes:
        url: of the server.
        served: what it serves.
    """

    def __init__(self, url: str, served: Served) -> None:
        self.url, self.served = url, served


@pytest.fixture(scope="module")
def pocket() -> Iterator[Pocket]:
    """One engine for all tests here; its context is short, so that no answer is long."""
    config = EngineConfig(
        model="pocket",
        device="cpu",
        dtype="float32",
        context_tokens=96,
        max_batch=4,
        batch_invariant=True,
        prefix_reuse=True,
    )
    source = CheckpointWeights("pocket", dtype="float32")
    with Engine(source, config) as engine, engine.scheduling(max_waiting=32) as scheduler:
        served = Served.of_engine(engine, scheduler, ("pocket",))
        with running(served, ServerConfig(port=0)) as (url, _, _):
            yield Pocket(url, served)


def test_streams_at_once_equal_streams_one_by_one(pocket: Pocket) -> None:
    """Greedy, token for token."""

    async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model="pocket", prompt=prompt, max_tokens=4, stream=True, logprobs=0
        )
        return "|".join([str(chunk.choices[0].logprobs) async for chunk in stream])

    async def both() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{pocket.url}/v1", api_key="none") as client:
            alone = [await ask(client, prompt) for prompt in PROMPTS]
            return alone, await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))

    alone, together = asyncio.run(both())
    assert alone == together
    assert len(set(alone)) > len(PROMPTS) // 2, "the prompts do not lead to the same answer"


PLACE: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Köln"]}, "size": {"enum": [1, 2]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


def test_answers_that_follow_a_schema(pocket: Pocket) -> None:
    """Each API's own way to ask for it; whatever the model would rather say."""
    messages: Any = [{"role": "user", "content": "A city"}]
    client = openai.OpenAI(base_url=f"{pocket.url}/v1", api_key="none", timeout=60)
    form: Any = {"name": "place", "schema": PLACE}
    chat = client.chat.completions.create(
        model="pocket",
        messages=messages,
        response_format={"type": "json_schema", "json_schema": form},
    )
    response = client.responses.create(
        model="pocket",
        input=messages,
        text={"format": {"type": "json_schema", **form}},
    )
    other = anthropic.Anthropic(base_url=pocket.url, api_key="none", timeout=60)
    message = other.messages.create(
        model="pocket",
        messages=messages,
        max_tokens=50,
        output_config={"format": {"type": "json_schema", "schema": PLACE}},
    )
    (block,) = message.content
    assert block.type == "text" and chat.choices[0].finish_reason == "stop"
    for text in (chat.choices[0].message.content, response.output_text, block.text):
        place = json.loads(text or "")
        assert place["city"] in ("Bonn", "Köln") and place["size"] in (1, 2)
    with pytest.raises(openai.BadRequestError, match="schema"):
        wrong: Any = {"name": "x", "schema": {"type": "wizard"}}
        client.chat.completions.create(
            model="pocket",
            messages=messages,
            response_format={"type": "json_schema", "json_schema": wrong},
        )


def test_figures_of_the_engine(pocket: Pocket) -> None:
    client = httpx2.Client(base_url=pocket.url, timeout=30)
    client.post("/v1/completions", json={"model": "pocket", "prompt": "Once", "max_tokens": 3})
    heat = client.get("/hotset/heat").json()
    assert len(heat["layers"]) == 6 and heat["steps"] > 0
    assert sum(heat["layers"][0]["use"]) % 4 == 0, "each token uses four experts of a layer"
    assert client.get("/plan").json()["fits"] is True
    counted = {
        line.split("{")[0]: float(line.rpartition(" ")[2])
        for line in client.get("/metrics").text.splitlines()
        if not line.startswith("#")
    }
    assert counted["vllm:generation_tokens_total"] >= 3
    assert counted["hotset_expert_misses_total"] > 0 and counted["hotset_slots"] == 0
    assert counted["vllm:kv_cache_usage_perc"] == 0.0, "no request is open"
    assert counted["hotset_decode_seconds_total"] > 0
    assert not [name for name in counted if "light" in name], "no rates are known of a CPU"


def test_cancels_and_bad_bodies_leave_nothing_behind(pocket: Pocket) -> None:
    """A small share of what `python tests/server/traffic.py` sends."""
    before = pocket.served.loop.scheduler.counts()
    outcomes = asyncio.run(rough_traffic(pocket.url, "pocket", num_requests=150, seed=1))
    assert_all_ended(pocket, before.num_finished, outcomes)


def assert_all_ended(pocket: Pocket, before: dict[FinishReason, int], outcomes: Outcomes) -> None:
    """Every request has its end, at the client and in the scheduler, and none failed.

    The scheduler's is awaited: a server learns a little later that a client has left.
    """
    assert outcomes.num_requests == sum(outcomes.counts.values())
    assert outcomes.counts["broken"] == 0, outcomes
    assert min(outcomes.counts[kind] for kind in ("finished", "left", "refused")) > 10
    scheduler = pocket.served.loop.scheduler

    def is_empty() -> bool:
        counts = scheduler.counts()
        return (counts.num_running, counts.num_waiting, counts.num_blocks_used) == (0, 0, 0)

    wait_until(is_empty)
    counts = scheduler.counts()
    assert counts.num_finished.get(FinishReason.FAILED, 0) == before.get(FinishReason.FAILED, 0)
    assert httpx2.get(f"{pocket.url}/health").status_code == 200


def test_no_request_from_the_openapi_page_is_an_error_of_ours(pocket: Pocket) -> None:
    """Every path with right and wrong bodies: no 500, and an answer in time."""
    schema = schemathesis.openapi.from_url(f"{pocket.url}/openapi.json")
    called: Counter[str] = Counter()
    for operation in (result.ok() for result in schema.get_all_operations()):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            call_all(operation, mode, called)
    assert min(called[path] for path in ("/v1/chat/completions", "/v1/messages")) > 4
    assert {"/v1/responses", "/v1/completions", "/tokenize", "/health"} <= called.keys()


def call_all(
    operation: schemathesis.APIOperation, mode: GenerationMode, called: Counter[str]
) -> None:
    """A few requests of one operation, the same in every run."""

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=4,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def call(case: schemathesis.Case) -> None:
        called[operation.path] += 1
        response = case.call(timeout=20)
        assert response.status_code < 500 or operation.path == "/health", response.text

    with suppress(Unsatisfiable):  # nothing can be wrong with a path that takes nothing
        call()
