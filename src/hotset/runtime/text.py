"""Text in and out: tokenizer, chat template, stop ids, streaming detokenisation.

Knows token ids and strings; nothing about logits or devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PretrainedConfig

from hotset.core.errors import RequestError
from hotset.core.request import SamplingParams
from hotset.runtime.grammar import GrammarCompiler
from hotset.runtime.spelling import spelling
from hotset.runtime.text_files import (
    harmony_stop_ids,
    load_generation_config,
    load_tokenizer,
    sampling_defaults,
    stop_ids,
)

Messages = Sequence[Mapping[str, Any]]

_REPLACEMENT = "\ufffd"
# Decoding starts at least this many tokens before what is new: the first token of a decode loses
# its leading space in some tokenizers.
_CONTEXT_TOKENS = 4


class Text:
    """The text side of one checkpoint.

    Args:
        folder: of the checkpoint.
        config: its config.

    Raises:
        CheckpointError: the tokenizer's files are missing or not understood, or the generation
            defaults have values that make no sense.
    """

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        self._tokenizer: Any = load_tokenizer(folder)
        # How long a text may be is the plan's business; the tokenizer would only warn about it.
        self._tokenizer.model_max_length = sys.maxsize
        generation = load_generation_config(folder)
        self._sampling_defaults = sampling_defaults(generation, folder)
        ends = stop_ids(config, generation, self._tokenizer.eos_token_id, folder)
        self._vocab: int = config.get_text_config().vocab_size
        self.stop_ids = ends | harmony_stop_ids(self._tokenizer.get_added_vocab())

    def encode(self, prompt: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer adds by itself.

        Raises:
            RequestError: it is no text, or has half a character that no encoding can hold.
        """
        _check_text(prompt, "the prompt")
        ids: list[int] = self._tokenizer(prompt)["input_ids"]
        return ids

    def encode_part(self, text: str) -> list[int]:
        """Ids of a piece of an answer; special tokens are those that it spells."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def encode_chat(self, messages: Messages, **kwargs: object) -> list[int]:
        """Ids of a conversation through the checkpoint's template, ready for the answer.

        The template prints its own special tokens; none is added a second time.

        Raises:
            RequestError: there is no template, it refuses the messages, or these are no texts.
        """
        _check_messages(messages)
        if not self._tokenizer.chat_template:
            raise RequestError(
                "this checkpoint has no chat template", hint="send a plain prompt instead"
            )
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **kwargs,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError(f"the chat template refuses the messages: {error}") from error
        return list(ids)

    @property
    def chat_template(self) -> str | None:
        """Source of the checkpoint's template; of all, where it has several by name."""
        template = self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template

    @cached_property
    def token_bytes(self) -> Callable[[int], bytes]:
        """Spells one id: the bytes that it stands for, special tokens by their names."""
        return spelling(self._tokenizer)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Makes what structured answers have to follow.

        Raises:
            ConfigError: llguidance is not installed.
            RequestError: the tokenizer is of a kind that cannot be looked into.
        """
        return GrammarCompiler(self._tokenizer, stop_ids=self.stop_ids, vocab=self._vocab)

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Text of ids, special tokens left out or by their names."""
        text: str = self._tokenizer.decode(
            list(ids),
            skip_special_tokens=not keep_special,
            clean_up_tokenization_spaces=False,
        )
        return text

    def sampling_defaults(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for; greedy where it says nothing.

        The only source of defaults: library, command line and server start from it.
        """
        return self._sampling_defaults


def _check_text(text: object, name: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{name} is of type `{type(text).__name__}`, it must be a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid text: character {error.start + 1} is a lone surrogate",
            hint="it often comes from bytes that are not UTF-8",
        ) from error


def _check_messages(messages: object) -> None:
    wanted = "a list of messages such as `{'role': 'user', 'content': 'Hello'}`"
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        kind = type(messages).__name__
        raise RequestError(f"`messages` is of type `{kind}`, it must be {wanted}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {number} is {message!r}; `messages` must be {wanted}")
        if isinstance(message.get("content"), str):
            _check_text(message["content"], f"message {number}")


class Detokenizer:
    """Turns ids into text as they come; the pieces together equal `decode` of all ids.

    A character that is split over tokens is held back until it is whole. A byte that belongs to no
    character is put out, as U+FFFD, with the next character that is whole. With `keep_special`,
    special tokens come by their names.
    """

    def __init__(self, text: Text, *, keep_special: bool = False) -> None:
        self._decode = partial(text.decode, keep_special=True) if keep_special else text.decode
        self._ids: list[int] = []
        # Where text was put out, so where a character ends; decoding starts at the first of them
        # and goes on from the last. A byte decoder makes nothing of half a character.
        self._ends = [0]

    def push(self, token_id: int) -> str:
        """Text that this id completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        piece = self._new_text()
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        self._ends.append(len(self._ids))
        while len(self._ends) > 2 and self._ends[1] <= len(self._ids) - _CONTEXT_TOKENS:
            self._ends.pop(0)
        return piece

    def flush(self) -> str:
        """What is still held back, at the end of the stream."""
        piece = self._new_text()
        self._ends.append(len(self._ids))
        return piece

    def _new_text(self) -> str:
        start, read = self._ends[0], self._ends[-1]
        before = self._decode(self._ids[start:read])
        return self._decode(self._ids[start:])[len(before) :]
