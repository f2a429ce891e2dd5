"""What is wrong with a command line before any command runs, said as every other error is.

Knows what typer raises for it; knows no command and no flag.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from hotset.core.errors import ConfigError

# Base of all that typer raises about words of a command line. It exports this one class only, of
# its own copy of click or of click itself, by its version.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]

# What the library that reads values calls the kinds that it wanted.
_WANTED = {
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "float_parsing": "a number",
}


@contextmanager
def usage_in_our_words() -> Iterator[None]:
    """Turns what typer raises about a command line into an error of this program, with a hint.

    Raises:
        ConfigError: the words are no command's, or a value is of another kind than its flag's.
        SystemExit: there are no words at all; the help has been printed.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, _USAGE_ERROR):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(str(error), err=True)
            sys.exit(ConfigError.exit_code)
        context = getattr(error, "ctx", None)
        command = "hotset" if context is None else context.command_path
        hint = f"`{command} --help` says what it takes"
        raise ConfigError(_message(error), hint=hint) from error


def _message(error: Any) -> str:
    """Flag, value and what it must be, where a value is of the wrong kind; else typer's words, with
    a small letter first and no full stop."""
    cause = error.__cause__
    details = cause.errors()[0] if hasattr(cause, "errors") else {}
    if details.get("type") in _WANTED:
        flag, value = error.param.opts[0], details["input"]
        return f"`{flag}` is `{value}`, it must be {_WANTED[details['type']]}"
    words: str = error.format_message().rstrip(".")
    return words[:1].lower() + words[1:]
