"""Logprobs as OpenAI's clients read them: tokens as text and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hotset.server.ask import TokenInfo
from hotset.server.wire import logprob

# A token's id to its bytes.
Spelling = Callable[[int], bytes]


def content_logprobs(tokens: Sequence[TokenInfo], spelling: Spelling) -> dict[str, Any]:
    """Of a chat: each token with the likeliest beside it."""
    content = [
        {
            **_entry(token.token_id, token.logprobs.logprob, spelling),
            "top_logprobs": [_entry(i, value, spelling) for i, value in token.logprobs.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(token_id: int, value: float, spelling: Spelling) -> dict[str, Any]:
    data = spelling(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": logprob(value),
        "bytes": list(data),
    }


def plain_logprobs(
    tokens: Sequence[TokenInfo], spelling: Spelling, *, start: int
) -> tuple[dict[str, Any], int]:
    """Of a completion: columns, and the characters of the answer up to the last of these tokens.

    Args:
        start: characters of the answer before the first of them.
    """
    offsets = [start]
    for token in tokens:
        offsets.append(offsets[-1] + len(spelling(token.token_id).decode("utf-8", "replace")))
    columns = {
        "tokens": [_word(token.token_id, spelling) for token in tokens],
        "token_logprobs": [logprob(token.logprobs.logprob) for token in tokens],
        "top_logprobs": [_top(token, spelling) for token in tokens],
        "text_offset": offsets[:-1],
    }
    return columns, offsets[-1]


def _top(token: TokenInfo, spelling: Spelling) -> dict[str, float]:
    """The likeliest by their words; of several with one word the first, which is the likeliest."""
    found: dict[str, float] = {}
    for token_id, value in token.logprobs.top:
        found.setdefault(_word(token_id, spelling), logprob(value))
    return found


def _word(token_id: int, spelling: Spelling) -> str:
    """A token's text; where it is part of a character its bytes, as OpenAI's API writes them."""
    data = spelling(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
