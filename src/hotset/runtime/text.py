"""Text in and out: tokenizer, chat template, stop ids, streaming detokenisation.

Knows token ids and strings; nothing about logits or devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from hotset.core.errors import CheckpointError, RequestError
from hotset.core.request import SamplingParams

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
        CheckpointError: the tokenizer's files are missing or not understood.
    """

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, LookupError, ImportError, TypeError, AttributeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"the tokenizer of `{folder}` cannot be loaded: {reason}",
                hint="hotset runs no code from a checkpoint; it needs a `tokenizer.json`",
            ) from error
        self._defaults = _generation_config(folder)
        self.stop_ids = stop_ids(config, self._defaults, self._tokenizer.eos_token_id)

    def encode(self, prompt: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer adds by itself."""
        ids: list[int] = self._tokenizer(prompt)["input_ids"]
        return ids

    def encode_chat(self, messages: Messages, **kwargs: object) -> list[int]:
        """Ids of a conversation through the checkpoint's template, ready for the answer.

        The template prints its own special tokens; none is added a second time.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
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

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def sampling_defaults(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for; greedy where it says nothing."""
        config = self._defaults
        if config is None or not config.do_sample:
            return SamplingParams()
        return SamplingParams(
            temperature=1.0 if config.temperature is None else config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=config.top_k or 0,
            min_p=config.min_p or 0.0,
        )


def _generation_config(folder: Path) -> GenerationConfig | None:
    if not (folder / "generation_config.json").exists():
        return None
    try:
        config: GenerationConfig = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"`{folder / 'generation_config.json'}`: {error}") from error
    return config


def stop_ids(
    config: PretrainedConfig, generation: GenerationConfig | None, tokenizer_eos: int | None
) -> frozenset[int]:
    """Union of the end ids of generation_config, config and tokenizer.

    Each alone is wrong for some published model: Qwen3.5's config names only `<|endoftext|>` and
    would never stop a chat turn, others leave an id to the tokenizer.

    Raises:
        CheckpointError: one of them is no id and no list of ids.
    """
    text = config.get_text_config()
    given = [getattr(source, "eos_token_id", None) for source in (generation, config, text)]
    found: set[int] = set()
    for value in (*given, tokenizer_eos):
        ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(token, int) for token in ids):
            raise CheckpointError(f"`eos_token_id` is {value!r}, which is no id and no list of ids")
        found.update(ids)
    return frozenset(found)


class Detokenizer:
    """Turns ids into text as they come; the pieces together equal `decode` of all ids.

    A character that is split over tokens is held back until it is whole. A byte that belongs to no
    character is put out, as U+FFFD, with the next character that is whole.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
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
        before = self._text.decode(self._ids[start:read])
        return self._text.decode(self._ids[start:])[len(before) :]
