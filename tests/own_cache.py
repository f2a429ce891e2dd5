"""Tiny architectures that do not run over the KV pool, and why, in words for the documentation.

`parity/test_attention_support` holds it from both sides: a type that is not here must run over the
pool, and one that is here must be refused for the reason given.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OwnCache:
    """Why a model keeps to transformers' own cache.

    Attributes:
        reason: part of what `find_attention` says.
        words: for readers.
        model_types: for which it is the first reason.
    """

    reason: str
    words: str
    model_types: tuple[str, ...]


OWN_CACHE = (
    OwnCache(
        "caches more than keys, values and a state (Deepseek",
        "compress keys and values of blocks of tokens",
        ("deepseek_v4",),
    ),
    OwnCache(
        "asks its cache for one length of all rows",
        "compute with one length for all rows when they decode",
        ("inkling2_text", "inkling_text"),
    ),
    OwnCache(
        "makes a cache of its own kind",
        "make a cache of a kind of their own",
        ("minimax",),
    ),
)
