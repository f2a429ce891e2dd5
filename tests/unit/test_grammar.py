"""Structured answers: whatever a mask allows is a prefix of sound JSON, and a schema is held to."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from hotset.core.errors import ConfigError, RequestError
from hotset.core.request import SamplingParams
from hotset.kernels.sample_adjust_reference import num_words, unpack_mask
from hotset.runtime.grammar import GrammarCompiler, Matcher
from hotset.runtime.sampling import Sampler
from vocabulary import BYTE_VOCAB, SPECIALS, byte_ids, byte_tokenizer

END, VOCAB = 1, BYTE_VOCAB + 40  # more logits than the tokenizer has ids
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), stop_ids=frozenset({END}), vocab=VOCAB)


def allowed(matcher: Matcher) -> set[int]:
    words = np.full(num_words(VOCAB), -1, dtype=np.int32)
    matcher.fill_mask(words)
    return set(unpack_mask(torch.from_numpy(words)[None], VOCAB)[0].nonzero().flatten().tolist())


def test_a_schema_is_followed_byte_by_byte(compiler: GrammarCompiler) -> None:
    matcher = compiler.json_schema(SCHEMA)
    for token in byte_ids('{"city": "Oslo", "days": 3}'):
        assert token in allowed(matcher) and END not in allowed(matcher)
        matcher.accept(token)
    assert matcher.is_complete or END in allowed(matcher)


def test_what_breaks_a_schema_is_not_allowed(compiler: GrammarCompiler) -> None:
    matcher = compiler.json_schema(SCHEMA)
    for token in byte_ids('{"city": "'):
        matcher.accept(token)
    first_letters = {byte_ids("O")[0], byte_ids("R")[0]}
    assert allowed(matcher) == first_letters
    with pytest.raises(RequestError, match="cannot be followed"):
        matcher.accept(byte_ids("X")[0])


def test_white_space_comes_to_an_end(compiler: GrammarCompiler) -> None:
    for space, most in ((" ", 1), ("\n", 1), ("\n" + " " * 32, 33)):
        matcher = compiler.json_object()
        for token in byte_ids("{" + space[:most]):
            assert token in allowed(matcher)
            matcher.accept(token)
        assert byte_ids('"')[0] in allowed(matcher)
    assert not allowed(matcher) & set(byte_ids(" \n\t"))


def test_ids_that_the_tokenizer_lacks_are_forbidden(compiler: GrammarCompiler) -> None:
    assert max(allowed(compiler.regex("(?s:.*)"))) < BYTE_VOCAB


def test_ends_where_nothing_can_follow(compiler: GrammarCompiler) -> None:
    matcher = compiler.regex("ab?")
    matcher.accept(byte_ids("a")[0])
    assert END in allowed(matcher) and not matcher.is_complete
    matcher.accept(END)
    assert matcher.is_complete


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda c: c.json_schema({"type": "nothing"}), "JSON schema"),
        (lambda c: c.json_schema({"type": "array", "uniqueItems": True}), "JSON schema"),
        (lambda c: c.json_schema({"$ref": "#"}), "JSON schema"),
        (lambda c: c.regex("("), "regular expression"),
        (lambda c: c.lark("start: missing"), "grammar"),
    ],
)
def test_what_cannot_be_held_to_is_refused(compiler: GrammarCompiler, make: Any, what: str) -> None:
    with pytest.raises(RequestError, match=f"the {what} cannot be followed"):
        make(compiler)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#"}, "it refers to itself without an end"),
        ({"type": "string", "pattern": "(?<=a)b"}, "regex parse error: look-around"),
    ],
)
def test_the_reason_is_in_words(compiler: GrammarCompiler, schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as info:
        compiler.json_schema(schema)
    assert info.value.option == "schema"


def chained(num_links: int) -> dict[str, Any]:
    """Objects within objects, each in a definition of its own."""
    links = {
        f"d{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(num_links)
    }
    return {"$defs": {**links, f"d{num_links}": {"type": "string"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "schema",
    [
        chained(900),
        {"type": "object", "properties": {f"p{n}": {} for n in range(1001)}},
        json.loads('{"items":' * 700 + "{}" + "}" * 700),
    ],
    ids=["chained", "wide", "nested"],
)
def test_a_schema_that_would_overflow_the_stack_is_refused(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    """Nothing that comes after an overflow can be tested: the process would be gone."""
    for make in (compiler.json_schema, compiler.json_rule):
        with pytest.raises(RequestError, match="too large to follow"):
            make(schema)


def test_schemas_of_many_definitions_are_followed(compiler: GrammarCompiler) -> None:
    """Flat ones, a chain, and one that comes back to itself."""
    many = {
        f"d{n}": {"type": "object", "properties": {"x": {"type": "string"}}} for n in range(150)
    }
    refs = [{"$ref": f"#/$defs/{name}"} for name in many]
    compiler.json_schema({"$defs": many, "anyOf": refs})
    compiler.json_schema(chained(100))
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    compiler.json_schema({"$defs": {"node": node}, "$ref": "#/$defs/node"})


def test_random_draws_make_sound_json(compiler: GrammarCompiler) -> None:
    """Through the sampler, from logits that know nothing of JSON."""
    sampler = Sampler(1, VOCAB, device=torch.device("cpu"))
    sampler.start(0, SamplingParams(temperature=1.0, seed=5), matcher=compiler.json_schema(SCHEMA))
    assert sampler.needs_host(0, num_steps=1)
    logits_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    logits_V[END] = 6.0  # or numbers go on and on
    ids: list[int] = []
    while not sampler.is_complete(0) and len(ids) < 200:
        ids.append(sampler.draw(0, logits_V).require_finite())
        sampler.accept(0, ids[-1])
    assert sampler.is_complete(0)
    answer = json.loads(byte_tokenizer().decode([i for i in ids if i != END]))
    assert answer["city"] in ("Oslo", "Rome") and isinstance(answer["days"], int)
    sampler.start(0, SamplingParams(temperature=1.0, seed=5))
    free = [sampler.draw(0, logits_V).token for _ in ids]
    assert free != ids and not sampler.needs_host(0, num_steps=1), (
        "control: without it they are other tokens"
    )


def test_marks_are_special_tokens_where_there_is_one(compiler: GrammarCompiler) -> None:
    matcher = compiler.lark(f"start: {compiler.literal('<end>')} {compiler.literal('<call>')}")
    assert allowed(matcher) == {SPECIALS.index("<end>")}
    for token in (SPECIALS.index("<end>"), *byte_ids("<call>")):
        assert token in allowed(matcher)
        matcher.accept(token)
    assert matcher.is_complete


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"need llguidance[^\n]*\n\nhint: .*pip install"):
        GrammarCompiler(byte_tokenizer(), stop_ids=frozenset({END}), vocab=VOCAB)


def test_free_answers_do_without_the_library() -> None:
    code = (
        "import sys; sys.modules['llguidance'] = None; import hotset\n"
        "with hotset.load('pocket', device='cpu', context=16) as model:\n"
        "    print(len(list(model.generate('The', max_tokens=2))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "2\n", done.stderr
