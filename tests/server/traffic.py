"""Rough traffic: answers that are read, clients that leave, bodies that are wrong.

`python tests/server/traffic.py URL MODEL [NUM_REQUESTS]` sends it to any server and says what came
of it; with PID it also says how the server's memory grew.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil

NUM_CLIENTS = 8
# What a body can be instead of a request.
WRONG = (b"{", b"null", b"[]", b"\xff", b'{"model": "M"}', b'{"model": "M", "messages": 3}')


@dataclass
class Outcomes:
    """What came of requests.

    Attributes:
        num_requests: sent.
        counts: `finished`; `left`, by its client; `refused`, with a status from 400 to 429;
            `broken`, by anything else.
        broken: what that was.
        memory: (seconds, resident bytes) of the server from time to time.
    """

    num_requests: int
    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


async def rough_traffic(
    url: str, model: str, *, num_requests: int, seed: int, pid: int | None = None
) -> Outcomes:
    """Sends requests, a few at a time."""
    chance, outcomes = random.Random(seed), Outcomes(num_requests)
    plans = [chance.random() for _ in range(num_requests)]
    queue: asyncio.Queue[float] = asyncio.Queue()
    for plan in plans:
        queue.put_nowait(plan)
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:

        async def work(number: int) -> None:
            own = random.Random(seed * 1000 + number)
            while not queue.empty():
                try:
                    kind = await _one(client, model, queue.get_nowait(), own)
                except (httpx2.HTTPError, BrokenAnswerError) as error:
                    kind = "broken"
                    outcomes.broken.append(repr(error))
                outcomes.counts[kind] += 1
                if pid is not None and sum(outcomes.counts.values()) % 50 == 0:
                    resident = psutil.Process(pid).memory_info().rss
                    outcomes.memory.append((time.monotonic(), resident))

        await asyncio.gather(*(work(number) for number in range(NUM_CLIENTS)))
    return outcomes


class BrokenAnswerError(Exception):
    """An answer that is none of those that the request may have."""


async def _one(client: httpx2.AsyncClient, model: str, plan: float, chance: random.Random) -> str:
    """One request: a quarter has a wrong body, a third of the others is left in the middle."""
    if plan > 0.25:
        return await _asked(client, model, chance, leaves=plan > 0.75)
    body = chance.choice(WRONG).replace(b"M", model.encode())
    headers = {"content-type": "application/json"}
    answer = await client.post("/v1/chat/completions", content=body, headers=headers)
    if answer.status_code != 400:
        raise BrokenAnswerError(answer.text)
    return "refused"


async def _asked(
    client: httpx2.AsyncClient, model: str, chance: random.Random, *, leaves: bool
) -> str:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "word " * chance.randint(1, 8)}],
        "max_tokens": chance.randint(1, 6),
        "temperature": chance.choice([0, 1]),
        "stream": leaves or chance.random() < 0.5,
        "ignore_eos": True,
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code == 429:
            return "refused"
        if answer.status_code != 200:
            raise BrokenAnswerError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            if leaves and chance.random() < 0.4:
                return "left"
            if '"error":' in line:
                raise BrokenAnswerError(line)
    return "finished"


def main() -> None:
    url, model = sys.argv[1:3]
    num_requests = int(sys.argv[3]) if len(sys.argv) > 3 else 2000
    pid = int(sys.argv[4]) if len(sys.argv) > 4 else None
    outcomes = asyncio.run(rough_traffic(url, model, num_requests=num_requests, seed=1, pid=pid))
    first = outcomes.memory[0][0] if outcomes.memory else 0.0
    memory = [(round(at - first, 1), resident) for at, resident in outcomes.memory]
    broken = {"broken": outcomes.broken[:5]}
    print(
        json.dumps(
            {"requests": num_requests, "counts": outcomes.counts, **broken, "memory": memory}
        )
    )


if __name__ == "__main__":
    main()
