"""Bytes of single tokens: together they are the text, whatever a tokenizer writes for bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hotset.runtime.spelling import spelling
from vocabulary import SPECIALS, byte_ids, byte_tokenizer

BYTES = spelling(byte_tokenizer())


@given(text=st.text(st.characters(codec="utf-8")))
@settings(max_examples=50, deadline=None)
def test_bytes_of_all_tokens_are_the_text(text: str) -> None:
    assert b"".join(BYTES(token) for token in byte_ids(text)) == text.encode()


def test_special_tokens_are_their_names_and_unknown_ids_are_nothing() -> None:
    assert [BYTES(token).decode() for token in range(len(SPECIALS))] == list(SPECIALS)
    assert BYTES(10_000) == b""


@pytest.mark.parametrize(
    ("piece", "want"), [("<0xF0>", b"\xf0"), ("\u2581the", b" the"), ("é", "é".encode())]
)
def test_sentencepiece_writes_bytes_as_numbers_and_spaces_as_blocks(
    piece: str, want: bytes
) -> None:
    tokenizer = Tokenizer(models.WordLevel({piece: 0}, unk_token=piece))
    tokenizer.decoder = decoders.ByteFallback()
    assert spelling(PreTrainedTokenizerFast(tokenizer_object=tokenizer))(0) == want
