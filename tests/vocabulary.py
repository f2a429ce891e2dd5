"""Tiny tokenizers for test checkpoints: numbered words, or bytes with the specials of a chat model.

Made with the tokenizers library and saved as checkpoints have them.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, START, END = "<bos>", "<eos>", "<start>", "<end>"
SPECIALS = (BOS, EOS, START, END)
BYTE_VOCAB = len(SPECIALS) + 256

# Prints its own BOS, as many published templates do.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def save_words(folder: Path, *, vocab: int) -> None:
    """Token i is the word `w<i>`; texts are words with spaces between."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def byte_tokenizer(
    *, add_bos: bool = True, template: str | None = TEMPLATE
) -> PreTrainedTokenizerFast:
    """Ids 0..3 are specials, 4 + b is byte b.

    Args:
        add_bos: the tokenizer puts a BOS before a text by itself.
        template: of chats; `None` for a checkpoint without one.
    """
    letters = pre_tokenizers.ByteLevel.alphabet()
    order = _bytes_to_letters()
    assert set(order) == set(letters)
    vocab = {special: i for i, special in enumerate(SPECIALS)}
    vocab |= {letter: len(SPECIALS) + byte for byte, letter in enumerate(order)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True) for special in SPECIALS])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 0)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    fast.chat_template = template
    return fast


def byte_ids(text: str | bytes) -> list[int]:
    """Ids of a text's bytes."""
    data = text.encode() if isinstance(text, str) else text
    return [len(SPECIALS) + byte for byte in data]


def _bytes_to_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = [], 256
    for byte in range(256):
        if byte in plain:
            letters.append(chr(byte))
        else:
            letters.append(chr(extra))
            extra += 1
    return letters
