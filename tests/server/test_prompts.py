"""Prompts that are far too long are refused after a part of them; others are made in one piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anthropic
import pytest
from clients import NAME, Scripted

from hotset.core.errors import ContextLengthError
from hotset.runtime.text import Text
from hotset.server.ask import Ask, Message
from hotset.server.prompts import Prompts
from tiny import tiny_config
from vocabulary import byte_tokenizer


@dataclass
class Encoder:
    """A tokenizer whose tokens are `letters` long, and how many of them it has seen."""

    letters: int
    chat_template: str = "{{ messages }}"
    seen: list[int] = field(default_factory=list)

    def encode(self, text: str) -> list[int]:
        self.seen.append(len(text))
        return [1] * (len(text) // self.letters)

    encode_part = encode

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


def prompts(encoder: Encoder) -> Prompts:
    return Prompts(cast("Text", encoder), context_tokens=1000)


@pytest.mark.parametrize("num_texts", [1, 3])
def test_a_part_is_enough_to_refuse(num_texts: int) -> None:
    """2,000 tokens of 4 letters are in the first slice of 65,536."""
    encoder = Encoder(letters=4)
    turns = [{"role": "user", "content": "x" * 400_000}] * num_texts
    with pytest.raises(ContextLengthError, match=f"about {num_texts}00000 prompt tokens"):
        prompts(encoder).ids(Ask(messages=turns))
    assert encoder.seen == [2**16]


@pytest.mark.parametrize("letters", [100, 400])
def test_what_may_fit_is_made_in_one_piece(letters: int) -> None:
    """200,000 letters are 2,000 tokens, or 500: whether they fit is for the scheduler to say."""
    encoder = Encoder(letters)
    ids = prompts(encoder).ids(Ask(prompt="x" * 200_000))
    assert len(ids) == 200_000 // letters and encoder.seen[-1] == 200_000


def test_a_usual_prompt_is_read_once() -> None:
    encoder = Encoder(letters=4)
    assert len(prompts(encoder).ids(Ask(prompt="x" * 4000))) == 1000
    assert encoder.seen == [4000]


USER: Message = {"role": "user", "content": "Where?"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Tromsø"}}}],
}


@pytest.mark.parametrize(
    ("printed", "want"),
    [
        ("{{ '' + call.function.arguments }}", '{"city": "Tromsø"}'),  # refuses an object
        ("{{ call.function.arguments }}", '{"city": "Tromsø"}'),  # prints Python's form of one
        ("{{ call.function.arguments | tojson }}", '{"city": "Tromsø"}'),
        (
            "{% for key, value in call.function.arguments.items() %}{{ value }}{% endfor %}",
            "Tromsø",
        ),
        ("", ""),
    ],
)
def test_arguments_of_earlier_calls_as_the_template_wants_them(
    tmp_path: Path, printed: str, want: str
) -> None:
    """DeepSeek's templates paste them as text; the others make text, or parts, of an object."""
    calls = "{% for call in m.tool_calls or [] %}<" + printed + ">{% endfor %}"
    template = "{% for m in messages %}" + calls + "{{ m.content }}{% endfor %}"
    assert rendered(tmp_path, template, [USER, CALL]) == f"Where?<{want}>"


@pytest.mark.parametrize(
    ("printed", "want"),
    [
        ("{{ m.reasoning_content }}", "Hm."),
        # gpt-oss's: reasoning beside content of a turn that calls is refused.
        (
            "{% set message = m %}{% if message.content and message.thinking and message.tool_calls"
            " %}{{ raise_exception('both') }}{% endif %}{{ message.thinking }}",
            "Hm.\n\nSoon.",
        ),
        ("{% set message = m %}{{ message.thinking }}", "Hm."),
        ("{% set message = m %}{% if 'thinking' in message %}yes{% endif %}", "yes"),
    ],
)
def test_reasoning_of_earlier_turns_as_the_template_reads_it(
    tmp_path: Path, printed: str, want: str
) -> None:
    template = "{% for m in messages %}{% if m.role == 'assistant' %}<" + printed + ">"
    turn = {**CALL, "content": "Soon.", "reasoning_content": "Hm."}
    made = rendered(tmp_path, template + "{% endif %}{{ m.content }}{% endfor %}", [USER, turn])
    said = "" if "Soon." in want else "Soon."
    assert made == f"Where?<{want}>{said}"


def rendered(folder: Path, template: str, messages: list[Message]) -> str:
    byte_tokenizer(template=template).save_pretrained(folder)
    text = Text(folder, tiny_config("qwen3_moe"))
    return text.decode(Prompts(text, context_tokens=1000).ids(Ask(messages=messages)))


def test_what_a_client_is_told(server: Scripted) -> None:
    """The words that clients look for to shorten a conversation, with about the right numbers."""
    with pytest.raises(anthropic.BadRequestError, match=r"too long: 1000000 tokens > 4096 maximum"):
        server.anthropic().messages.create(
            model=NAME, messages=[{"role": "user", "content": "x" * 1_000_000}], max_tokens=5
        )
    assert server.is_idle
