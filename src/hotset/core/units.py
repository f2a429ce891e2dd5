"""Bytes as people write them, both ways. Knows nothing about what is measured."""

from __future__ import annotations

import re
from decimal import Decimal

from hotset.core.errors import ConfigError

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
# Written out: `\d` takes the digits of every script.
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")

# Offsets and sizes of the system are 64-bit and signed.
MAX_BYTES = 2**63 - 1

GIB = 2**30
MIB = 2**20


def parse_bytes(text: str | int, *, name: str = "size") -> int:
    """Turns `8GiB`, `500MB`, `1.5 GiB` or a plain count of bytes into bytes.

    Raises:
        ConfigError: not a number with a known unit, below 0, or more than any machine has. A bare
            number above 0 needs no unit.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        wanted = "whole bytes or a text such as `8GiB`"
        raise ConfigError(f"`{name}` is {text!r}, it must be {wanted}", option=name)
    num_bytes = text if isinstance(text, int) else _bytes_of(text, name)
    if num_bytes < 0:
        raise ConfigError(f"`{name}` is {text}, it must not be negative", option=name)
    if num_bytes > MAX_BYTES:
        raise ConfigError(f"`{name}` is `{text}`, the most is 8 EiB", option=name)
    return num_bytes


def _bytes_of(text: str, name: str) -> int:
    match = _SIZE.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or (unit and unit not in _UNITS):
        raise ConfigError(
            f"`{name}` is `{text}`, which is not a size",
            hint="write a number and a unit: `8GiB`, `500MB`, `1.5GiB`",
            option=name,
        )
    return int(Decimal(match.group(1)) * _UNITS[unit or "b"])


def format_bytes(num_bytes: float) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more: `1.50 GiB`."""
    sign, value = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{sign}{value:.0f} B" if unit == "B" else f"{sign}{value:.2f} {unit}"
        value /= 1024
    return f"{sign}{value:.2f} TiB"
