"""Text in and out: end ids, chat prompts, defaults of a checkpoint, characters over tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hotset.core.errors import CheckpointError, RequestError
from hotset.core.request import SamplingParams
from hotset.runtime.text import Detokenizer, Text
from hotset.runtime.text_files import harmony_stop_ids, stop_ids
from tiny import tiny_config
from vocabulary import BYTE_VOCAB, SPECIALS, byte_ids, byte_tokenizer

CONFIG = tiny_config("qwen3_moe")
HELLO = [{"role": "user", "content": "hello"}]


def make_text(folder: Path, tokenizer: Any = None, **generation: object) -> Text:
    """The text side of a checkpoint that has nothing else."""
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return Text(folder, CONFIG)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return make_text(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """As sentencepiece models: words with a mark for the space before, bytes where there is no
    word, and a text loses its first space."""
    words = ["<unk>", "\u2581a", "b", "\u2581", "\u2581hello", "."]
    vocab = {word: i for i, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder = tmp_path_factory.mktemp("fallback")
    return make_text(folder, PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def pieces(text: Text, ids: list[int]) -> list[str]:
    """What a stream puts out for each id, and at its end."""
    stream = Detokenizer(text)
    return [*(stream.push(token) for token in ids), stream.flush()]


def test_a_split_character_comes_whole(text: Text) -> None:
    """SV-03: four bytes, one delta; two- and three-byte letters too."""
    assert pieces(text, byte_ids("\U0001f600")) == ["", "", "", "\U0001f600", ""]
    hangul = "\ud55c\uae00"
    assert pieces(text, byte_ids(hangul)) == ["", "", "\ud55c", "", "", "\uae00", ""]
    assert pieces(text, byte_ids("a\u00e9b")) == ["a", "", "\u00e9", "b", ""]


def test_a_stream_that_ends_within_a_character(text: Text) -> None:
    """One mark at most, as when all is decoded at once."""
    cut = byte_ids("ok\U0001f600")[:4]
    assert "".join(pieces(text, cut)) == text.decode(cut) == "ok\ufffd"


def test_an_invalid_byte_does_not_block(text: Text) -> None:
    got = pieces(text, byte_ids(b"a\xffbc"))
    assert got == ["a", "", "\ufffdb", "c", ""]


def test_specials_are_left_out_and_hold_nothing_back(text: Text) -> None:
    ids = [0, *byte_ids("hi"), 2, 3, *byte_ids("!"), 1]
    assert "".join(pieces(text, ids)) == text.decode(ids) == "hi!"


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, BYTE_VOCAB - 1), max_size=40))
def test_pieces_are_the_decoded_whole(text: Text, ids: list[int]) -> None:
    """Of any bytes, sound or not."""
    assert "".join(pieces(text, ids)) == text.decode(ids)


@settings(max_examples=100, deadline=None)
@given(sample=st.text(max_size=20), words=st.lists(st.integers(1, 5), max_size=8))
def test_pieces_of_a_byte_fallback_tokenizer(fallback: Text, sample: str, words: list[int]) -> None:
    """Such a decoder makes nothing of half a character and drops a first space, so that decoding
    may start at neither of them."""
    ids = [*words, *(6 + byte for byte in sample.encode()), *words]
    assert "".join(pieces(fallback, ids)) == fallback.decode(ids)


def test_a_long_answer_is_decoded_piece_by_piece(text: Text, monkeypatch: Any) -> None:
    """The work for a token does not grow with the answer."""
    longest, decode = 0, text.decode

    def watched(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    monkeypatch.setattr(text, "decode", watched)
    assert "".join(pieces(text, byte_ids("plain words " * 40))) == "plain words " * 40
    assert longest < 16


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "tokenizer_eos", "want"),
    [
        (5, [5, 7], 9, {5, 7, 9}),  # SV-19
        ([5, 6], None, None, {5, 6}),
        (None, 4, 4, {4}),
        (None, None, None, set()),
        (0, None, None, {0}),
    ],
)
def test_end_ids_are_a_union(
    config_eos: Any, generation_eos: Any, tokenizer_eos: int | None, want: set[int]
) -> None:
    config = tiny_config("qwen3_moe")
    config.eos_token_id = config_eos
    generation = GenerationConfig(eos_token_id=generation_eos) if generation_eos else None
    assert stop_ids(config, generation, tokenizer_eos) == want


def test_end_ids_of_the_text_part_count() -> None:
    config = tiny_config("qwen3_5_moe")
    config.text_config.eos_token_id = 6
    assert 6 in stop_ids(config, None, None)


def test_harmony_ends_with_return_and_call_and_not_with_a_message() -> None:
    """Whatever the generation config says; ids of gpt-oss, early files of which lack 200012."""
    vocab = {"<|return|>": 200002, "<|call|>": 200012, "<|end|>": 200007}
    assert harmony_stop_ids(vocab) == frozenset()
    vocab |= {"<|channel|>": 200005, "<|message|>": 200008}
    assert harmony_stop_ids(vocab) == {200002, 200012}


def test_end_ids_that_are_no_ids_are_refused() -> None:
    with pytest.raises(CheckpointError, match="`eos_token_id` is 'x'"):
        stop_ids(CONFIG, GenerationConfig(eos_token_id="x"), None)


def test_one_bos_and_no_second(text: Text, tmp_path: Path) -> None:
    """SV-18: a plain prompt gets the tokenizer's own, a chat its template's."""
    assert text.encode("hi") == [0, *byte_ids("hi")]
    chat = text.encode_chat(HELLO)
    assert chat.count(0) == 1 and chat[0] == 0
    assert chat == [0, 2, *byte_ids("user\nhello"), 3, *byte_ids("\n"), 2, *byte_ids("assistant\n")]
    without = make_text(tmp_path, byte_tokenizer(add_bos=False))
    assert without.encode("hi") == byte_ids("hi")
    assert without.encode_chat(HELLO) == chat


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    template = "{{ 'thinking' if enable_thinking else 'plain' }}"
    text = make_text(tmp_path, byte_tokenizer(template=template))
    assert text.encode_chat(HELLO, enable_thinking=True) == byte_ids("thinking")
    assert text.encode_chat(HELLO) == byte_ids("plain")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5]['content'] }}", "refuses the messages"),
        ("{% if %}", "refuses the messages"),
    ],
)
def test_what_a_template_refuses_is_said(
    tmp_path: Path, template: str | None, message: str
) -> None:
    """SV-10: with the template's own words; the text side goes on."""
    text = make_text(tmp_path, byte_tokenizer(template=template))
    with pytest.raises(RequestError, match=message):
        text.encode_chat(HELLO)
    assert text.encode("hi") == [0, *byte_ids("hi")]


@pytest.mark.parametrize(
    ("generation", "want"),
    [
        ({}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.5}, SamplingParams()),
        ({"do_sample": False, "top_p": 0.9}, SamplingParams(top_p=0.9)),
        ({"do_sample": True}, SamplingParams(temperature=1.0)),
        ({"temperature": 0.5}, SamplingParams(temperature=0.5)),
        ({"repetition_penalty": 1.05}, SamplingParams(repetition_penalty=1.05)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01},
            SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.01),
        ),
    ],
)
def test_sampling_defaults_are_the_checkpoints(
    tmp_path: Path, generation: dict[str, Any], want: SamplingParams
) -> None:
    assert make_text(tmp_path, **generation).sampling_defaults() == want


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "`{folder}` has no `tokenizer.json`"),
        ("tokenizer.json", "not json", "`{file}` is damaged: it is not JSON"),
        ("tokenizer.json", "{}", "the tokenizer of `{folder}` cannot be loaded"),
        ("tokenizer.json", POINTER, "`{file}` is a Git LFS pointer"),
        ("tokenizer_config.json", "[]", "`{file}` is damaged: it is not a JSON object"),
        ("tokenizer_config.json", "{", "`{file}` is damaged: it is not JSON"),
        ("generation_config.json", "{", "`{file}` is damaged: it is not JSON"),
        ("generation_config.json", "[]", "`{file}` is damaged: it is not a JSON object"),
        (
            "generation_config.json",
            '{"do_sample": true, "temperature": -1}',
            "`{file}`: `temperature` is -1",
        ),
        (
            "generation_config.json",
            '{"repetition_penalty": 2.5}',
            "`{file}`: `repetition_penalty` is 2.5",
        ),
        ("generation_config.json", '{"max_new_tokens": -1}', "`{file}`: `max_new_tokens`"),
        ("generation_config.json", '{"eos_token_id": "a"}', "`{file}`: `eos_token_id` is 'a'"),
        (
            "generation_config.json",
            '{"eos_token_id": [1, 128]}',
            "`{file}`: `eos_token_id` is [1, 128], the vocabulary has 128 ids",
        ),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    make_text(tmp_path, do_sample=False)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        Text(tmp_path, CONFIG)
    expected = message.replace("{folder}", str(tmp_path)).replace("{file}", str(tmp_path / file))
    assert caught.value.message.startswith(expected)
    assert caught.value.hint


def test_the_vocabulary_of_these_tests() -> None:
    """Ids 0..3 are the specials, the rest bytes."""
    tokenizer = byte_tokenizer()
    assert tokenizer.convert_ids_to_tokens(list(range(4))) == list(SPECIALS)
    assert len(tokenizer) == BYTE_VOCAB
    assert tokenizer.decode(byte_ids("\u00e9\U0001f600 z")) == "\u00e9\U0001f600 z"
