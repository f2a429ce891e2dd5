"""The Python API: load a model, generate text, read what it cost.

    with hotset.load("pocket", device="cpu") as model:
        for token in model.generate("Once upon a time", max_tokens=32):
            print(token.text, end="", flush=True)

Joins the engine (ids) with the checkpoint's text side. The command line is a thin layer over it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import index
from typing import Any

import torch

from hotset.core.closing import Closing
from hotset.core.config import EngineConfig
from hotset.core.errors import RequestError
from hotset.core.plan import MemoryPlan
from hotset.core.request import FinishReason, SamplingParams
from hotset.runtime.engine import Engine
from hotset.runtime.memory import measure
from hotset.runtime.routing import Traffic
from hotset.runtime.selfcheck import Check, check_memory, check_speed
from hotset.runtime.text import Detokenizer, Messages, Text
from hotset.runtime.weights import CheckpointWeights


@dataclass(frozen=True)
class Token:
    """One step of an answer.

    Attributes:
        text: what this token completes; empty while a character is incomplete, and for a stop id.
        token_id: its id.
        finish_reason: set on the last one.
    """

    text: str
    token_id: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Stats:
    """What the latest answer cost, and what the process takes.

    Attributes:
        num_prompt_tokens, num_tokens: of the answer.
        first_token_seconds: from the request to its first token.
        tokens_per_second: of the tokens after the first; 0 with fewer than two.
        hit_rate: share of the experts used after the first token that had a slot; 1 with fewer
            than two.
        link_bytes_per_token: bytes of the others, for each token after the first.
        prompt_link_bytes: bytes of experts without a slot that the prompt used.
        num_slots: slots of the engine.
        device_peak_bytes, host_peak_bytes: most that the process held at once.
    """

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    first_token_seconds: float = 0.0
    tokens_per_second: float = 0.0
    hit_rate: float = 1.0
    link_bytes_per_token: float = 0.0
    prompt_link_bytes: int = 0
    num_slots: int = 0
    device_peak_bytes: int = 0
    host_peak_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def load(
    model: str | os.PathLike[str] = "pocket",
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Model:
    """Loads a model.

    Args:
        model: hub id, local folder, or `pocket`, the small model inside the package.
        progress: called with (expert bytes loaded, expert bytes in all) while loading.
        options: `vram` and `ram` (bytes or text such as `8GiB`), `context`, and every other field
            of `EngineConfig`: `device`, `dtype`, `prefill_chunk`, `kernels`, `policy`, `half_life`,
            `graphs`, `compiled`, `poison`, `strict`, `revision`.

    Raises:
        ConfigError: an unknown option or a bad value.
        CheckpointError: the checkpoint is missing, damaged or not supported.
        CapacityError: it does not fit.
        HardwareError: the machine lacks something.
    """
    config = make_config(model, **options)
    source = CheckpointWeights(config.model, dtype=config.dtype, revision=config.revision)
    return Model(Engine(source, config, progress=progress))


def make_config(model: str | os.PathLike[str], **options: Any) -> EngineConfig:
    """An `EngineConfig` from the options of `load`, sizes in words included."""
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    return EngineConfig.from_options(name, **options)


class Model(Closing):
    """A loaded model with its tokenizer. Made by `load`.

    Attributes:
        engine: token ids in, token ids out.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._stats = Stats(num_slots=engine.plan.num_slots)

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan that the engine was built by."""
        return self.engine.plan

    @property
    def stats(self) -> Stats:
        """Costs of the latest answer, up to its latest token."""
        used = measure(self.engine.device)
        return replace(
            self._stats,
            device_peak_bytes=used.device_peak_bytes,
            host_peak_bytes=used.host_peak_bytes,
        )

    def self_check(self) -> list[Check]:
        """What was planned and predicted against what is: memory now, and the speed of the latest
        answer if it was long enough and the machine's rates are known."""
        stats = self.stats
        return [
            *check_memory(self.engine, device_peak_bytes=stats.device_peak_bytes),
            *check_speed(
                self.engine,
                num_tokens=stats.num_tokens,
                tokens_per_second=stats.tokens_per_second,
                hit_rate=stats.hit_rate,
            ),
        ]

    @property
    def text(self) -> Text:
        """Tokenizer and chat template of the checkpoint.

        Raises:
            RequestError: the model has none.
        """
        if self.engine.text is None:
            raise RequestError("this model has no tokenizer", hint="pass `token_ids`")
        return self.engine.text

    def generate(  # noqa: PLR0913 - keyword-only, each a plain sampling parameter
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | torch.Tensor | None = None,
        messages: Messages | None = None,
        max_tokens: int | None = None,
        stop_ids: Collection[int] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
    ) -> Iterator[Token]:
        """Generates an answer token by token.

        Args:
            prompt: plain text; or
            token_ids: ids, [T]; or
            messages: a conversation, through the checkpoint's chat template. Exactly one of them.
            max_tokens: most new tokens; `None` goes on to the end of the context.
            stop_ids: ids that end the answer; default the checkpoint's.
            temperature, top_p, top_k, min_p, seed, presence_penalty, frequency_penalty,
                repetition_penalty, logit_bias: see `SamplingParams`; `None` is what the
                checkpoint's generation_config.json says, greedy where it says nothing.

        Raises:
            RequestError: what is wrong with this request; nothing else is affected.
        """
        ids = self._prompt_ids(prompt, token_ids, messages)
        sampling = self._sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            logit_bias=logit_bias,
        )
        # Checked here and not at the first `next`, so that a wrong request fails where it is made.
        steps = self.engine.generate_ids(
            ids,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=None if stop_ids is None else frozenset(_ids(stop_ids, "stop_ids")),
        )
        return self._stream(ids, steps)

    def _sampling(self, **given: Any) -> SamplingParams:
        """The checkpoint's defaults, and over them what is not `None`."""
        defaults = self.engine.text.sampling_defaults() if self.engine.text else SamplingParams()
        chosen = {name: value for name, value in given.items() if value is not None}
        return replace(defaults, **chosen)

    def _stream(self, ids: list[int], steps: Iterator[Any]) -> Iterator[Token]:
        meter = _Meter(self.engine, len(ids))
        stream = Detokenizer(self.engine.text) if self.engine.text else None
        for step in steps:
            last = step.finish_reason is not None
            stopped = step.finish_reason is FinishReason.STOP
            piece = "" if stopped or stream is None else stream.push(step.token_id)
            if last and stream is not None:
                piece += stream.flush()
            self._stats = meter.count()
            yield Token(piece, step.token_id, step.finish_reason)

    def _prompt_ids(
        self,
        prompt: str | None,
        token_ids: Sequence[int] | torch.Tensor | None,
        messages: Messages | None,
    ) -> list[int]:
        given = [value for value in (prompt, token_ids, messages) if value is not None]
        if len(given) != 1:
            raise RequestError(
                f"{len(given)} of `prompt`, `token_ids` and `messages` are given, it must be one"
            )
        if prompt is not None:
            return self.text.encode(prompt)
        if messages is not None:
            return self.text.encode_chat(messages)
        return _ids(token_ids, "token_ids")

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Next-token logits after every token, [T, V] float32 on the CPU."""
        return self.engine.logits(token_ids)

    def close(self) -> None:
        """Gives all memory back. Safe to call twice."""
        self.engine.close()


def _ids(values: object, name: str) -> list[int]:
    """Plain ids, from whatever holds whole numbers."""
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise RequestError(f"`{name}` is {values!r}, it must be a list of token ids")
    try:
        return [index(value) for value in values]
    except TypeError as error:
        raise RequestError(f"`{name}` must be whole numbers: {error}") from error


class _Meter:
    """Times one answer and takes its share of the engine's traffic."""

    def __init__(self, engine: Engine, num_prompt_tokens: int) -> None:
        self._engine = engine
        self._num_prompt_tokens = num_prompt_tokens
        self._start = time.perf_counter()
        self._before = engine.traffic
        self._first: tuple[float, Traffic] | None = None
        self._num_tokens = 0

    def count(self) -> Stats:
        """One more token; the figures so far."""
        now, traffic = time.perf_counter(), self._engine.traffic
        self._num_tokens += 1
        if self._first is None:
            self._first = now, traffic
        first_time, first_traffic = self._first
        decode, num_later = traffic.minus(first_traffic), self._num_tokens - 1
        seconds = now - first_time
        return Stats(
            num_prompt_tokens=self._num_prompt_tokens,
            num_tokens=self._num_tokens,
            first_token_seconds=first_time - self._start,
            tokens_per_second=num_later / seconds if num_later else 0.0,
            hit_rate=decode.hit_rate,
            link_bytes_per_token=decode.link_bytes / num_later if num_later else 0.0,
            prompt_link_bytes=first_traffic.minus(self._before).link_bytes,
            num_slots=self._engine.plan.num_slots,
        )
