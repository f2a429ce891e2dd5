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
) -> dict[str, Any]:
    """Of a completion: columns.

    Args:
        start: characters of the answer before the first of these tokens.
    """
    words = [spelling(token.token_id).decode("utf-8", "replace") for token in tokens]
    offsets = [start]
    for word in words:
        offsets.append(offsets[-1] + len(word))
    return {
        "tokens": words,
        "token_logprobs": [logprob(token.logprobs.logprob) for token in tokens],
        "top_logprobs": [
            {
                spelling(i).decode("utf-8", "replace"): logprob(value)
                for i, value in token.logprobs.top
            }
            for token in tokens
        ],
        "text_offset": offsets[:-1],
    }
