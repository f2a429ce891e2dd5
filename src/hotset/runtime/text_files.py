"""The tokenizer and the generation defaults of a checkpoint, from files that are checked first.

transformers makes an empty tokenizer where files are missing, and takes any value for a default;
here both are refused, and the file is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from hotset.checkpoint.files import LFS_POINTER, read_json, readable, refuse_lfs_pointer
from hotset.core.errors import CheckpointError, RequestError
from hotset.core.request import SamplingParams

GENERATION_CONFIG = "generation_config.json"

_EDIT_HINT = "correct the value, or compare the file with the one that was published"
# Any of these holds a vocabulary: the library's own format, tiktoken's, sentencepiece's, BPE's.
_VOCABULARIES = (
    "tokenizer.json",
    "*.tiktoken",
    "*.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_JSON_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)


def load_tokenizer(folder: Path) -> Any:
    """The library's tokenizer of a checkpoint.

    Raises:
        CheckpointError: its files are missing, damaged, Git LFS pointers or not understood.
    """
    with readable(folder):
        if not any(next(folder.glob(name), None) for name in _VOCABULARIES):
            raise CheckpointError(
                f"`{folder}` has no `tokenizer.json`, nor another tokenizer's file",
                hint="download or copy the tokenizer's files as well",
            )
    for name in _JSON_FILES:
        with readable(folder / name):
            if (folder / name).is_file():
                with (folder / name).open("rb") as stream:
                    refuse_lfs_pointer(folder / name, stream.read(len(LFS_POINTER)))
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, LookupError, ImportError, TypeError, AttributeError) as error:
        # A file that is no JSON object is named instead of what the library makes of it.
        for name in _JSON_FILES:
            if (folder / name).is_file():
                read_json(folder / name)
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"the tokenizer of `{folder}` is code in the checkpoint, and hotset runs none",
                hint="add a `tokenizer.json`, made once with the checkpoint's own code",
            ) from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"the tokenizer of `{folder}` cannot be loaded: {reason}",
            hint="are `tokenizer.json` and `tokenizer_config.json` those that were published?",
        ) from error


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """The checkpoint's generation defaults, `None` where it has none.

    Raises:
        CheckpointError: the file is damaged, or the library refuses a value.
    """
    path = folder / GENERATION_CONFIG
    if not path.exists():
        return None
    read_json(path)
    try:
        config: GenerationConfig = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"`{path}`: {error}", hint=_EDIT_HINT) from error
    return config


def sampling_defaults(config: GenerationConfig | None, folder: Path) -> SamplingParams:
    """What the generation defaults ask for; greedy where they say nothing.

    A temperature counts unless `do_sample` is false. The rest counts in either case: a penalty
    changes greedy answers too, and a request that sets only a temperature samples with the
    checkpoint's `top_p`.

    Raises:
        CheckpointError: a value that no request may have.
    """
    if config is None:
        return SamplingParams()
    temperature = 1.0 if config.do_sample else 0.0
    if config.do_sample is not False and config.temperature is not None:
        temperature = config.temperature
    try:
        return SamplingParams(
            temperature=temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=config.top_k or 0,
            min_p=config.min_p or 0.0,
            repetition_penalty=(
                1.0 if config.repetition_penalty is None else config.repetition_penalty
            ),
        )
    except RequestError as error:
        path = folder / GENERATION_CONFIG
        raise CheckpointError(f"`{path}`: {error.message}", hint=_EDIT_HINT) from error


def stop_ids(
    config: PretrainedConfig,
    generation: GenerationConfig | None,
    tokenizer_eos: int | None,
    folder: Path = Path(),
) -> frozenset[int]:
    """Union of the end ids of generation_config, config and tokenizer.

    Each alone is wrong for some published model: Qwen3.5's config names only `<|endoftext|>` and
    would never stop a chat turn, others leave an id to the tokenizer.

    Args:
        config, generation, tokenizer_eos: where they may be.
        folder: for messages.

    Raises:
        CheckpointError: one of them is no id of the vocabulary and no list of such ids.
    """
    text = config.get_text_config()
    sources = [(generation, GENERATION_CONFIG), (config, "config.json"), (text, "config.json")]
    found = set() if tokenizer_eos is None else {tokenizer_eos}
    for source, name in sources:
        value = getattr(source, "eos_token_id", None)
        ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
        for token in ids:
            what = f"`{folder / name}`: `eos_token_id` is {value!r}"
            if isinstance(token, bool) or not isinstance(token, int):
                raise CheckpointError(f"{what}, which is no id and no list of ids", hint=_EDIT_HINT)
            if not 0 <= token < text.vocab_size:
                raise CheckpointError(
                    f"{what}, the vocabulary has {text.vocab_size} ids", hint=_EDIT_HINT
                )
        found.update(ids)
    return frozenset(found)


def harmony_stop_ids(added_vocab: Mapping[str, int]) -> frozenset[int]:
    """Ids that end a turn in the Harmony format, if the tokenizer speaks it.

    `<|return|>` ends an answer and `<|call|>` hands over to a tool; early files of gpt-oss leave
    the latter out of their generation config. `<|end|>` ends only one message of an answer.

    Args:
        added_vocab: special tokens and their ids.
    """
    ends = ("<|return|>", "<|call|>")
    if not {"<|channel|>", "<|message|>", *ends} <= added_vocab.keys():
        return frozenset()
    return frozenset(added_vocab[name] for name in ends)
