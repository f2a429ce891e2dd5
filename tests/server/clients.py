"""A running server whose model says what a test wants, and the clients to ask it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import anthropic
import numpy as np
import openai
import torch
from scripted import ScriptedScheduler, running

from hotset.core.request import TokenMatcher
from hotset.kernels.sample_adjust_reference import num_words, unpack_mask
from hotset.runtime.routing import Traffic
from hotset.runtime.text import Text
from hotset.server.config import ServerConfig
from hotset.server.run import Process
from hotset.server.served import Served
from hotset.server.state import Cells, Figures
from vocabulary import BYTE_VOCAB, byte_ids

# What a busy machine may need for anything that takes no time by itself.
WAIT_SECONDS = 30.0
NAME = "scripted"
END_ID = 1

# As Qwen3's: tools as JSON, a switch for thinking, calls between tags.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<start>system\n# Tools\n<tools>{% for tool in tools %}"
    "{{ tool | tojson }}\n{% endfor %}</tools>\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><end>\n{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' and loop.first %}"
    "{{ raise_exception('a result follows its call') }}{% endif %}"
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message comes first') }}{% endif %}<start>{{ m['role'] }}\n"
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m['content'] }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not done():
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.005)


class NoState:
    """Of an engine that is not there."""

    def figures(self) -> Figures:
        return Figures(Traffic(steps=3, used=10, hits=7, link_bytes=3000, fills=2))

    def plan(self) -> dict[str, Any]:
        return {"fits": True}

    def cells(self) -> Cells:
        use_LE, missed_LE = np.array([[4, 6]]), np.array([[3, 0]])
        return Cells(np.array([2]), use_LE, missed_LE, np.array([[False, True]]))


@dataclass
class Scripted:
    """A running server whose model says what a test wants.

    Attributes:
        url: of the server.
        scheduler: what it is served by.
        served: what it serves.
        process, thread: the server and where it runs.
        thinks: whether it tells the reasoning of an answer from the rest.
        end_tokens: how many tokens of an answer are its end, in its usage.
    """

    thinks: ClassVar[bool] = True
    end_tokens: ClassVar[int] = 0

    scheduler: ScriptedScheduler
    served: Served
    url: str
    process: Process
    thread: threading.Thread

    def say(self, text: str | bytes) -> None:
        """From now on every answer is this."""
        self.scheduler.script = lambda request: byte_ids(text)

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self.scheduler.rows

    def ended(self) -> None:
        """Waits until every request has ended, and the server's loop knows of it."""
        wait_until(lambda: not (self.scheduler.rows or self.served.loop.num_open))

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20, **options
        )

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(
            base_url=self.url, api_key="none", max_retries=0, timeout=20, **options
        )


def served_by(scheduler: ScriptedScheduler, text: Text) -> Served:
    """A model that says what its scheduler wants."""
    return Served.of(
        scheduler,
        names=(NAME, "alias"),
        text=text,
        vocab=BYTE_VOCAB,
        context_tokens=scheduler.context_tokens,
        stop_ids=frozenset({END_ID}),
        state=NoState(),
    )


@contextmanager
def serving(text: Text, config: ServerConfig | None = None, **options: Any) -> Iterator[Scripted]:
    """A server over a scripted scheduler.

    Args:
        options: of the scheduler.
    """
    scheduler = ScriptedScheduler(lambda request: byte_ids("Hello"), **options)
    served = served_by(scheduler, text)
    with running(served, config) as (url, process, thread):
        yield Scripted(scheduler, served, url, process, thread)


def allows(matcher: TokenMatcher, text: str) -> bool:
    """Whether an answer may be this text, byte by byte, and end there."""
    words, end = np.zeros(num_words(BYTE_VOCAB), dtype=np.int32), END_ID
    for token in (*byte_ids(text), end):
        if matcher.is_complete:
            return token == end
        matcher.fill_mask(words)
        if not unpack_mask(torch.from_numpy(words)[None], BYTE_VOCAB)[0, token]:
            return False
        if token != end:
            matcher.accept(token)
    return True
