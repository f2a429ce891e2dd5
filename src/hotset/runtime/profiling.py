"""Runs texts through a model to learn what it routes. Knows ids and domains; no text gets further.

Prompts are prefilled and, where that is asked for, answered; the recorder sees every token that
the model takes in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hotset.core.errors import CapacityError, ConfigError, RequestError
from hotset.core.trace import Trace, TraceInfo, load_trace
from hotset.core.trace_file import DEFAULT_MAX_BYTES
from hotset.models.fingerprint import model_fingerprint
from hotset.runtime.engine import Engine
from hotset.runtime.recorder import RoutingRecorder, recording
from hotset.runtime.text import Text


@dataclass(frozen=True)
class Excerpt:
    """One sequence to run.

    Attributes:
        ids: of its tokens, at least one.
        domain: what kind of text it is.
        num_answer: tokens to generate behind it, 0 for none.
    """

    ids: tuple[int, ...]
    domain: str = ""
    num_answer: int = 0


def cut_text(
    text: Text, words: str, *, domain: str, window: int, most: int | None = None
) -> list[Excerpt]:
    """A text as excerpts of at most `window` tokens.

    Args:
        text: the model's tokenizer.
        words: the text.
        most: tokens to take in all, from its beginning; `None` for all.

    Raises:
        ConfigError: it has no tokens.
    """
    ids = text.encode(words)[:most]
    if not ids:
        raise ConfigError(f"the text `{domain}` has no tokens")
    return [
        Excerpt(tuple(ids[start : start + window]), domain) for start in range(0, len(ids), window)
    ]


def read_prompts(text: Text, path: Path, lines: str, *, num_answer: int = 0) -> list[Excerpt]:
    """Prompts of a JSON-lines file: objects with `prompt` or `messages`, and perhaps a `domain`.

    Args:
        path: names the file in errors.
        lines: its contents.
        num_answer: tokens to generate behind each.

    Raises:
        ConfigError: a line is none of these, or the tokenizer or the chat template refuses it; the
            message has its number.
    """
    found = []
    for number, line in enumerate(lines.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"`{path}`, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from error
        if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
            raise ConfigError(f"{where} is not an object with either `prompt` or `messages`")
        is_chat = "messages" in entry
        try:
            ids = text.encode_chat(entry["messages"]) if is_chat else text.encode(entry["prompt"])
        except RequestError as error:
            raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error
        domain = entry.get("domain", path.stem)
        if not isinstance(domain, str) or not ids:
            raise ConfigError(f"{where} has no tokens, or a `domain` that is no text")
        found.append(Excerpt(tuple(ids), domain, num_answer))
    if not found:
        raise ConfigError(f"`{path}` holds no prompt")
    return found


def record_trace(
    engine: Engine,
    excerpts: Sequence[Excerpt],
    path: Path,
    *,
    name: str,
    source: str = "",
    max_bytes: int = DEFAULT_MAX_BYTES,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """Runs excerpts one after the other and records them.

    Args:
        path: of the trace file.
        name, source: of model and texts, for people.
        progress: told the tokens of each excerpt when it is done.

    Raises:
        CapacityError: an excerpt does not fit the context, or the trace its file.
        ConfigError: the file cannot be written.
    """
    for excerpt in excerpts:
        need, room = len(excerpt.ids) + excerpt.num_answer + 1, engine.plan.context_tokens
        if need > room:
            raise CapacityError(
                f"a sequence of {need} tokens of `{excerpt.domain}` does not fit the context of "
                f"{room}",
                hint="raise `--context`, or cut texts shorter with `--window`",
            )
    with record_engine(engine, path, name=name, source=source, max_bytes=max_bytes) as recorder:
        for excerpt in excerpts:
            recorder.domain = excerpt.domain
            for _ in _run(engine, excerpt):
                pass
            if progress is not None:
                progress(len(excerpt.ids))
        if recorder.stopped:
            raise CapacityError(
                f"the trace `{path}` could not be written whole, {recorder.num_tokens} tokens are "
                "in it",
                hint="take fewer tokens with `--tokens`, or give it a disk with more room",
            )
    return load_trace(path)


@contextmanager
def record_engine(
    engine: Engine,
    path: Path,
    *,
    name: str = "",
    source: str = "",
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Iterator[RoutingRecorder]:
    """Within the block all that an engine routes goes into a trace file, up to `max_bytes`.

    Raises:
        ConfigError: the file cannot be written.
    """
    info = TraceInfo(model_fingerprint(engine.geometry, engine.model), model=name, source=source)
    with recording(engine.steps, RoutingRecorder(path, info, max_bytes=max_bytes)) as recorder:
        yield recorder


def _run(engine: Engine, excerpt: Excerpt) -> Iterator[object]:
    # The last token is drawn and not taken in, so it is in no trace.
    return engine.generate_ids(list(excerpt.ids), max_tokens=excerpt.num_answer + 1)
