"""Text that commands read and print: files and stdin in, counts in words out."""

from __future__ import annotations

import sys
from pathlib import Path

from hotset.core.errors import ConfigError


def read_text(file: Path, *, flag: str) -> str:
    """The UTF-8 text of a file, or of stdin for `-`.

    Raises:
        ConfigError: there is none, or it is not UTF-8; the message names the flag.
    """
    from_stdin = str(file) == "-"
    if from_stdin and sys.stdin is None:  # what Python makes of a closed descriptor
        raise ConfigError(f"`{flag} -` reads stdin, which is closed")
    try:
        # Bytes, because how stdin decodes depends on the locale.
        data = sys.stdin.buffer.read() if from_stdin else file.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"`{flag} {file}` cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"`{flag} {file}` is not UTF-8: {error}") from error


def amount(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
