"""`hotset chat`: a conversation in the terminal, with a model loaded here or one that is served.

A thin loop: lines come from `chat_input`, answers from `chat_source`, words go to stdout.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from hotset.cli.chat_input import Lines, Typed, lines_of_terminal
from hotset.cli.chat_source import (
    DEFAULT_URL,
    Cost,
    Piece,
    Source,
    is_url,
    local,
    served,
)
from hotset.cli.options import (
    Context,
    Device,
    Dtype,
    Json,
    KernelsOption,
    Lossless,
    PolicyOption,
    PrefillChunk,
    Ram,
    Revision,
    Vram,
    engine_config,
    named_by_flag,
)
from hotset.cli.sampling import (
    FrequencyPenalty,
    LogitBias,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    chosen_sampling,
)
from hotset.core import env
from hotset.core.errors import ConfigError, RequestError
from hotset.core.request import check_max_tokens

STOPPED = "stopped"

HELP = """Enter sends, Alt+Enter or Ctrl+J starts a line, Up and Down go through what you wrote.
Ctrl+C stops an answer, Ctrl+D leaves.
/new    forget the conversation
/undo   forget the last question and its answer
/help   this
/quit   leave"""


def chat(  # noqa: PLR0913 - one parameter for each flag
    target: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL|URL]",
            help="Hub id, local folder or `pocket`, loaded here; or the address of a server.",
        ),
    ] = DEFAULT_URL,
    *,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before the conversation.")
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(help="File that keeps what you wrote, for Up and Down the next time."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Of a server. Default: HOTSET_API_KEY, or none.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer. Default: what the context leaves.")
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    repetition_penalty: RepetitionPenalty = None,
    logit_bias: LogitBias = None,
    vram: Vram = None,
    ram: Ram = None,
    device: Device = None,
    dtype: Dtype = None,
    context: Context = None,
    prefill_chunk: PrefillChunk = None,
    lossless: Lossless = False,
    kernels: KernelsOption = None,
    revision: Revision = None,
    policy: PolicyOption = None,
    as_json: Json = False,
) -> None:
    """Talk to a model. Without MODEL or URL: to the server that `hotset serve` starts.

    From a pipe, each line is a message. With `--json`, one JSON object for each answer.

    Example: `hotset chat pocket --device cpu`
    """
    request = chosen_sampling(
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
    with named_by_flag():
        check_max_tokens(max_tokens)
    if max_tokens is not None:
        request["max_tokens"] = max_tokens
    engine = {
        "vram": vram,
        "ram": ram,
        "device": device,
        "dtype": dtype,
        "context": context,
        "prefill_chunk": prefill_chunk,
        "kernels": kernels,
        "revision": revision,
        "policy": policy,
    }
    if lossless:  # a flag that is not set is not one for the other kind of target either
        engine["lossless"] = True
    lines = lines_of_terminal(history)
    with closing(_source(target, engine, api_key)) as source:
        Talk(source, request, system=system, as_json=as_json).run(lines)


def _source(target: str, engine: dict[str, Any], api_key: str | None) -> Source:
    """Where answers come from.

    Raises:
        ConfigError: flags that the other kind of target has.
    """
    if is_url(target):
        for name, value in engine.items():
            if value is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"`{flag}` is for a model that is loaded here, not for a URL")
        return served(target, api_key or env.API_KEY.get())
    if api_key is not None:
        raise ConfigError("`--api-key` is for a URL, not for a model that is loaded here")
    return local(engine_config(target, **engine))


class Talk:
    """One conversation.

    Args:
        source: of answers.
        request: `max_tokens` and sampling of each of them.
        system: the first message, if any.
        as_json: print answers whole, as JSON.
    """

    def __init__(
        self, source: Source, request: dict[str, Any], *, system: str | None, as_json: bool
    ) -> None:
        self._source, self._request, self._as_json = source, request, as_json
        self._head = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = []

    def run(self, lines: Lines) -> None:
        """Until the user leaves."""
        if lines.is_terminal:
            _say(f"{self._source.name}; /help says what can be typed, Ctrl+D leaves")
        for typed in lines:
            if typed.command is None:
                self._answer(typed)
            elif typed.command == "/quit":
                return
            else:
                self._command(typed.command)

    def _command(self, command: str) -> None:
        if command == "/new":
            self._messages.clear()
            _say("a new conversation")
        elif command == "/undo":
            del self._messages[-2:]
            _say(f"{len(self._messages) // 2} questions are left")
        elif command == "/help":
            _say(HELP)
        else:
            _say(f"there is no `{command}`; /help says what there is")

    def _answer(self, typed: Typed) -> None:
        """One question and its answer; a question that got none is forgotten."""
        self._messages.append({"role": "user", "content": typed.text})
        said, reason, cost = "", None, Cost()
        conversation = [*self._head, *self._messages]
        try:
            with closing(self._source.answer(conversation, self._request)) as pieces:
                for piece in pieces:
                    cost.count(piece)
                    said += piece.text
                    self._show(piece)
                    reason = piece.finish_reason or reason
        except KeyboardInterrupt:
            reason = STOPPED
        except RequestError as error:
            _say(f"error: {error}")
        if said:
            self._messages.append({"role": "assistant", "content": said})
        else:
            self._messages.pop()
        self._end(said, reason, cost)

    def _show(self, piece: Piece) -> None:
        if self._as_json:
            return
        if piece.reasoning:
            typer.secho(piece.reasoning, nl=False, dim=True)
        typer.echo(piece.text, nl=False)
        sys.stdout.flush()

    def _end(self, said: str, reason: str | None, cost: Cost) -> None:
        if self._as_json:
            figures = {"finish_reason": reason, **cost.to_dict()}
            typer.echo(json.dumps({"text": said, **figures}, ensure_ascii=False))
        elif reason is not None:
            typer.echo()
            _say(f"[{'stopped, ' if reason == STOPPED else ''}{cost}]")


def _say(words: str) -> None:
    typer.secho(words, err=True, dim=True)
