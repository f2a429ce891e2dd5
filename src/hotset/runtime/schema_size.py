"""How large a JSON schema is, before a library that goes through it by recursion meets it.

llguidance 1.9 compiles schemas on the thread's stack, and a process whose stack overflows is gone:
objects within objects, through references too, passed 1,500 levels and not 3,000 on a stack of
8 MiB. Knows nothing else of schemas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from hotset.core.errors import RequestError

MAX_LEVELS = 600
# Compiling an object takes time with the square of its names: a second for 2,000.
MAX_NAMES = 1000


def check_schema_size(schema: object, *, option: str | None) -> None:
    """Refuses a schema that is too deep or too wide to compile.

    Levels are those of the schema, and of all that it refers to, each once: no path through it that
    comes to no place twice is longer.

    Args:
        option: what the user set that it is, for the error.

    Raises:
        RequestError: it has more than `MAX_LEVELS` levels, or an object of more than `MAX_NAMES`.
    """
    references, whole = set(), 0
    for level in _levels(schema):
        whole += 1
        for part in level:
            if isinstance(part, Mapping):
                if len(part) > MAX_NAMES:
                    raise _too_large(f"an object has more than {MAX_NAMES} names", option)
                if isinstance(part.get("$ref"), str):
                    references.add(part["$ref"])
        if whole > MAX_LEVELS:
            break
    levels = whole
    for reference in references:
        target = _target(schema, reference)
        levels += whole if target is None else sum(1 for _ in _levels(target))
        if levels > MAX_LEVELS:
            break
    if levels > MAX_LEVELS:
        raise _too_large(f"with what it refers to it has more than {MAX_LEVELS} levels", option)


def _levels(value: object) -> Iterator[list[object]]:
    """Objects and lists of a value, from the outermost inwards."""
    level: list[object] = [value] if isinstance(value, Mapping | list) else []
    while level:
        yield level
        within: list[object] = []
        for part in level:
            entries: Any = part.values() if isinstance(part, Mapping) else part
            within += [entry for entry in entries if isinstance(entry, Mapping | list)]
        level = within


def _target(schema: object, reference: str) -> object:
    """What a reference within a schema means (RFC 6901); `None` for any other."""
    if not reference.startswith("#"):
        return None
    at: Any = schema
    for name in reference[1:].split("/")[1:]:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        at = at.get(key) if isinstance(at, Mapping) else None
    return at if isinstance(at, Mapping | list) else None


def _too_large(reason: str, option: str | None) -> RequestError:
    return RequestError(f"the JSON schema is too large to follow: {reason}", option=option)
