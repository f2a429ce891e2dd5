"""Bytes of single tokens, which text cannot show: a token may be half a character.

Knows the two ways in which tokenizers write bytes as letters; nothing of texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# What sentencepiece writes for a space.
_SPACE = "\u2581"


def spelling(tokenizer: Any) -> Callable[[int], bytes]:
    """Id -> bytes, of a tokenizer of the library; no bytes for an id that it does not have."""
    letters = _byte_letters() if _is_byte_level(tokenizer) else {}
    added = tokenizer.added_tokens_decoder

    def spell(token_id: int) -> bytes:
        if token_id in added:
            return str(added[token_id]).encode()
        piece = tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if letters and all(letter in letters for letter in piece):
            return bytes(letters[letter] for letter in piece)
        byte = _BYTE.fullmatch(piece)
        return bytes.fromhex(byte[1]) if byte else piece.replace(_SPACE, " ").encode()

    return spell


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether its vocabulary is written in GPT-2's letters for bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in str(backend.decoder)


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters: printable bytes are themselves, the others come after 255 in order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
