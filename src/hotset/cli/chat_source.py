"""Where the answers of `hotset chat` come from: a model loaded here, or a server over HTTP.

Both stream pieces of text, and both stop when the user interrupts. Knows no terminal.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol
from urllib.error import HTTPError, URLError

from hotset.cli.ask_server import key_hint, open_page
from hotset.cli.progress import loading_bar
from hotset.core.config import EngineConfig
from hotset.core.errors import ConfigError, HardwareError, RequestError

if TYPE_CHECKING:
    from hotset.api import Model

DEFAULT_URL = "http://127.0.0.1:8000"

Messages = list[dict[str, str]]

_ASK_SECONDS = 10.0
# Between two pieces of an answer: a long prompt may take minutes, and not every server says that
# it is still at work.
_PIECE_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some of an answer.

    Attributes:
        text, reasoning: what was said, or thought before it.
        finish_reason: why the answer ended, on its last piece.
        num_tokens: of the answer so far; `None` where that is not known yet.
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    num_tokens: int | None = None


class Source(Protocol):
    """Of answers.

    Attributes:
        name: what answers, for people.
    """

    name: str

    def answer(self, messages: Messages, request: dict[str, Any]) -> Generator[Piece]:
        """Streams an answer. Closing the generator stops it, and so does Ctrl-C.

        Args:
            messages: a conversation that ends with a question.
            request: `max_tokens` and sampling, where given.

        Raises:
            RequestError: it was refused, or broke off; the next one may be answered.
            KeyboardInterrupt: the user stopped it.
        """

    def close(self) -> None:
        """Gives back what it holds."""


class Cost:
    """Time and tokens of one answer, from now on."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start
        self._num_tokens: int | None = None

    def count(self, piece: Piece) -> None:
        """One more piece."""
        if piece.text or piece.reasoning:
            self._last = time.perf_counter()
            self._first = self._last if self._first is None else self._first
        if piece.num_tokens is not None:
            self._num_tokens = piece.num_tokens

    def to_dict(self) -> dict[str, Any]:
        """`None` where nothing is known."""
        first = None if self._first is None else self._first - self._start
        return {
            "num_tokens": self._num_tokens,
            "first_token_seconds": first,
            "tokens_per_second": self._rate(),
        }

    def _rate(self) -> float | None:
        """From the first token on."""
        if self._first is None or not self._num_tokens or self._last <= self._first:
            return None
        return (self._num_tokens - 1) / (self._last - self._first)

    def __str__(self) -> str:
        rate = self._rate()
        parts = [] if self._num_tokens is None else [f"{self._num_tokens} tokens"]
        parts += [] if rate is None else [f"{rate:.1f} tokens/s"]
        if self._first is not None:
            parts.append(f"first after {self._first - self._start:.2f} s")
        return ", ".join(parts) or "no answer"


class LocalSource:
    """A model in this process.

    Args:
        model: is closed with this.
        name: of the model.
    """

    def __init__(self, model: Model, name: str) -> None:
        self.name, self._model = name, model

    def answer(self, messages: Messages, request: dict[str, Any]) -> Generator[Piece]:
        """See `Source`."""
        ids = self._model.text.encode_chat(messages)
        tokens = self._model.generate(token_ids=ids, **request)
        assert isinstance(tokens, Generator)
        # Closed at once: the engine has one answer at a time.
        with _asked_to_stop() as asked, closing(tokens):
            for number, token in enumerate(tokens, 1):
                reason = None if token.finish_reason is None else token.finish_reason.value
                yield Piece(text=token.text, finish_reason=reason, num_tokens=number)
                if asked and reason is None:
                    raise KeyboardInterrupt

    def close(self) -> None:
        """Gives the model's memory back."""
        self._model.close()


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that the first Ctrl-C fills, so that a step comes to its end; another interrupts."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


class ServedSource:
    """A server that knows `/v1/chat/completions`.

    Args:
        url: of the server, without `/v1`.
        api_key: that it asks for.

    Raises:
        HardwareError: it does not answer.
        ConfigError: it refuses, or answers something else.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url, self._key = url, api_key
        self._model = self._first_model()
        self.name = f"{self._model} at {url}"

    def _first_model(self) -> str:
        page = f"{self._url}/v1/models"
        try:
            with open_page(page, api_key=self._key, seconds=_ASK_SECONDS) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except HTTPError as error:
            raise ConfigError(
                f"`{page}` refuses: {_reason(error)}", hint=key_hint(error)
            ) from error
        except (URLError, OSError, HTTPException) as error:
            raise HardwareError(
                f"`{page}` does not answer: {getattr(error, 'reason', error)}",
                hint="start `hotset serve MODEL`, or name a model to load here",
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"`{page}` answers with something else than models") from error

    def answer(self, messages: Messages, request: dict[str, Any]) -> Generator[Piece]:
        """See `Source`."""
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **request,
        }
        page = f"{self._url}/v1/chat/completions"
        try:
            with open_page(page, api_key=self._key, seconds=_PIECE_SECONDS, body=body) as answer:
                yield from _pieces(answer)
        except HTTPError as error:
            raise RequestError(_reason(error)) from error
        except (URLError, OSError, HTTPException, ValueError) as error:
            raise RequestError(f"the answer broke off: {error}") from error

    def close(self) -> None:
        """Nothing is held between two answers."""


def _pieces(answer: HTTPResponse) -> Iterator[Piece]:
    """Of the events of a stream; `ValueError` where they are none.

    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise RequestError(str(chunk["error"].get("message", chunk["error"])))
        if chunk.get("usage"):
            yield Piece(num_tokens=chunk["usage"]["completion_tokens"])
        for choice in chunk.get("choices", []):
            delta = choice.get("delta", {})
            yield Piece(
                text=delta.get("content") or "",
                reasoning=delta.get("reasoning_content") or "",
                finish_reason=choice.get("finish_reason"),
            )
    raise ValueError("the stream has no end")


def _reason(error: HTTPError) -> str:
    """What a refusal says, in the words of its body where it has some."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError, OSError):
        return f"{error.code} {error.reason}"


def is_url(target: str) -> bool:
    """Whether it names a server, and no model.

    Raises:
        ConfigError: it is the address of a server without the protocol.
    """
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", target):
        raise ConfigError(f"`{target}` is no model", hint=f"a server is `http://{target}`")
    return target.startswith(("http://", "https://"))


def served(url: str, api_key: str | None) -> ServedSource:
    """A server's answers; a URL that ends with `/v1` is the same server."""
    return ServedSource(url.rstrip("/").removesuffix("/v1"), api_key)


def local(config: EngineConfig) -> LocalSource:
    """Answers of a model that is loaded now."""
    from hotset.api import Model
    from hotset.runtime.engine import Engine
    from hotset.runtime.weights import CheckpointWeights

    source = CheckpointWeights(config.model, dtype=config.dtype, revision=config.revision)
    with loading_bar() as progress:
        model = Model(Engine(source, config, progress=progress))
    return LocalSource(model, config.model)
