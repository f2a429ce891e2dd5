"""Where system messages stand: as they came, or where the chat template has a place for them.

Coding agents send several of them, and some in the middle of a conversation. Many templates refuse
any but the first, or print nothing of it. Knows messages, and no template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hotset.server.ask import Message

_FIRST, _LATE = "hotset-first", "hotset-late"
PROBE: tuple[Message, ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "system", "content": _FIRST},
    {"role": "user", "content": "Hello"},
    {"role": "system", "content": _LATE},
    {"role": "user", "content": "Hello"},
)
"""A conversation with system messages wherever clients put them."""


def shows_all(rendered: str) -> bool:
    """Whether a template that made this of `PROBE` prints every system message."""
    return _FIRST in rendered and _LATE in rendered


def placed(messages: Sequence[Message], *, anywhere: Callable[[], bool]) -> Sequence[Message]:
    """A conversation that a template can print.

    Those in front become one. A later one is said by the user, at its place, so that what comes
    before it is the same prompt as without it, and its prefix is used again.

    Args:
        anywhere: whether the template prints system messages anywhere; asked only if there are any
            but the first.
    """
    if all(message["role"] != "system" for message in messages[1:]) or anywhere():
        return messages
    made: list[Message] = []
    for message in messages:
        before = made[-1]["role"] if made else "system"
        if message["role"] != "system":
            made.append(message)
            continue
        role = "system" if before == "system" else "user"
        text = message["content"]
        if made and before == role:
            text = f"{made.pop()['content']}\n\n{text}"
        made.append({"role": role, "content": text})
    return made
