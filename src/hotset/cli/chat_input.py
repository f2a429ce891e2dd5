"""What a user of `hotset chat` types: messages of several lines, and commands; or lines of a pipe.

Knows keys and history; nothing of answers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hotset.core.errors import ConfigError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

# A path or a formula may begin with a slash too: only one word of letters is a command.
_COMMAND = re.compile(r"/[a-z]+")


@dataclass(frozen=True)
class Typed:
    """One message.

    Attributes:
        text: without white space around it; never empty.
    """

    text: str

    @property
    def command(self) -> str | None:
        """Such as `/new`, if it is one."""
        return self.text if _COMMAND.fullmatch(self.text) else None


class Lines(Protocol):
    """Messages, until the user leaves.

    Attributes:
        is_terminal: somebody reads what is said beside the answers.
    """

    is_terminal: bool

    def __iter__(self) -> Iterator[Typed]: ...


class PipeLines:
    """Each line of stdin is a message."""

    is_terminal = False

    def __iter__(self) -> Iterator[Typed]:
        for line in sys.stdin:
            if text := line.strip():
                yield Typed(text)


class TerminalLines:
    """An editor of several lines with a history, drawn on stderr.

    Args:
        session: of prompt_toolkit.
    """

    is_terminal = True

    def __init__(self, session: PromptSession[str]) -> None:
        self._session = session

    def __iter__(self) -> Iterator[Typed]:
        while True:
            try:
                text = self._session.prompt("> ").strip()
            except KeyboardInterrupt:  # drops what was being typed, and nothing else
                continue
            except EOFError:
                return
            if text:
                yield Typed(text)


def lines_of_terminal(history: Path | None) -> Lines:
    """Messages from the terminal, or from a pipe.

    Args:
        history: a file that keeps them.

    Raises:
        ConfigError: the file cannot be written, or stdin is closed.
    """
    if sys.stdin is None:  # what Python makes of a closed descriptor
        raise ConfigError("stdin is closed, and messages are read from it")
    if not sys.stdin.isatty():
        if history is not None:
            raise ConfigError("`--history` is for a terminal, and stdin is none")
        return PipeLines()
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.output import create_output

    if history is not None:
        try:
            history.touch(mode=0o600)
        except OSError as error:
            raise ConfigError(f"`--history {history}`: {error.strerror}") from error
    session: PromptSession[str] = PromptSession(
        multiline=True,
        key_bindings=_keys(),
        history=InMemoryHistory() if history is None else FileHistory(history),
        prompt_continuation="  ",
        # stdout is for answers.
        output=create_output(stdout=sys.stderr),
    )
    return TerminalLines(session)


def _keys() -> KeyBindings:
    """Enter sends, Alt+Enter and Ctrl+J start a line."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
