"""Lists of numbers that a flag takes, separated by commas.

Knows how they are written and what a share and a count may be; knows no flag.
"""

from __future__ import annotations

from hotset.core.config import MAX_TOKENS
from hotset.core.errors import ConfigError


def read_numbers(text: str, flag: str, *, example: str = "0.25,0.5") -> list[float]:
    """The numbers, each once, in the order given.

    Args:
        example: for the hint.

    Raises:
        ConfigError: one is none; names the flag, as below.
    """
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigError(
            f"`{flag}` is `{text}`, which is not a list of numbers",
            hint=f"write numbers separated by commas: `{example}`",
        ) from error


def read_shares(text: str, flag: str) -> list[float]:
    """Parts of a whole, 0..1."""
    numbers = read_numbers(text, flag)
    for number in numbers:
        if not 0 <= number <= 1:  # so that NaN fails too
            raise ConfigError(f"`{flag}` has a share of {number:g}, it must be in 0..1")
    return numbers


def read_counts(text: str, flag: str) -> list[int]:
    """Whole numbers from 1 on."""
    numbers = read_numbers(text, flag, example="1,8")
    for number in numbers:
        if not (number.is_integer() and number >= 1):
            raise ConfigError(f"`{flag}` has {number:g}, it must be whole numbers from 1 on")
        if number > MAX_TOKENS:
            raise ConfigError(f"`{flag}` has {number:.0f}, the most is {MAX_TOKENS}")
    return [int(number) for number in numbers]
