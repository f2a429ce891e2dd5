"""Servers over scripted answers, with the text side of a tiny checkpoint whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clients import TEMPLATE, Scripted, serving

from hotset.runtime.text import Text
from tiny import tiny_config
from vocabulary import byte_tokenizer


@pytest.fixture(scope="session")
def byte_text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Id 4 + b is byte b."""
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer(template=TEMPLATE).save_pretrained(folder)
    return Text(folder, tiny_config("qwen3_moe"))


@pytest.fixture(scope="module")
def _module_server(byte_text: Text) -> Iterator[Scripted]:
    with serving(byte_text) as server:
        yield server


@pytest.fixture
def server(_module_server: Scripted) -> Scripted:
    """One server for a whole module; it says "Hello" at the beginning of each test."""
    _module_server.say("Hello")
    return _module_server
