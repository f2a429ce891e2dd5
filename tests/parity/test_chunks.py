"""Lengths around every border: of prefill chunks, of kernels' blocks, of the context.

The oracle is one stock forward over the longest text: attention is causal, so its logits are those
of every shorter text too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from families import (
    CONTEXT,
    Family,
    Pocket,
    continuation_bound,
    difference,
    make_family,
    stock_logits,
    text,
)
from hotset.core.errors import RequestError
from hotset.runtime.engine import Engine
from hotset.runtime.prefill import run_together

CHUNK = 64
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)


@pytest.fixture(scope="module")
def engine(pocket: Pocket) -> Iterator[Engine]:
    with pocket.engine(context_tokens=272, prefill_chunk=CHUNK) as engine:
        yield engine


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_every_length(pocket: Pocket, engine: Engine, num_tokens: int) -> None:
    """LC-05, LC-07: all logits of the text, and the first token of an answer to it."""
    ids, want = pocket.ids[:num_tokens], pocket.want_TV[:num_tokens]
    got = engine.logits(ids)
    assert got.shape == want.shape
    assert difference(got, want) <= continuation_bound(engine, want)
    (step,) = engine.generate_ids(ids, max_tokens=1, stop_ids=frozenset())
    assert step.token_id == int(want[-1].argmax())


@pytest.mark.parametrize("model_type", ["qwen3_next", "gpt_oss", "jamba"])
def test_states_windows_and_token_by_token(tmp_path: Path, model_type: str) -> None:
    """T2 and T3: recurrent states and sliding windows over chunk borders; a model that continues
    a prompt token by token says so."""
    family = make_family(model_type, tmp_path)
    want = stock_logits(family.stock(), text(129))
    with family.engine(context_tokens=130, prefill_chunk=CHUNK) as engine:
        for num_tokens in (63, 64, 65, 127, 128, 129):
            got = engine.logits(text(129)[:num_tokens])
            assert difference(got, want[:num_tokens]) <= continuation_bound(engine, want)


def test_a_strict_engine_refuses_what_runs_token_by_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = make_family("jamba", tmp_path)
    with family.engine(prefill_chunk=16) as engine:
        engine.logits(text(20))
    assert "4 of 20 tokens run one by one" in caplog.text
    with family.engine(prefill_chunk=16, strict=True) as engine:
        engine.logits(text(16))
        with pytest.raises(RequestError, match="cannot continue a prompt in chunks") as caught:
            engine.logits(text(17))
        assert "--prefill-chunk" in (caught.value.hint or "")


def test_single_tokens_run_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """16 tokens, 128 single ones together, and two more: of a long prompt no thousands of forwards
    are open at a time."""
    family, ids, together = make_family("jamba", tmp_path), text(16 + 128 + 2), []

    def counted(forwards: list[object], *args: object, **kwargs: object) -> object:
        together.append(len(forwards))
        return run_together(forwards, *args, **kwargs)  # type: ignore[arg-type]

    want_V = stock_logits(family.stock(), ids)[-1]
    monkeypatch.setattr("hotset.runtime.engine.run_together", counted)
    with family.engine(context_tokens=150, prefill_chunk=16) as engine:
        (step,) = engine.generate_ids(ids, max_tokens=1, stop_ids=frozenset())
    assert together == [128]
    assert step.token_id == int(want_V.argmax())
    assert "130 of 146 tokens run one by one" in caplog.text


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A context of 64 tokens, two chunks."""
    family: Family = make_family("qwen3_moe", tmp_path_factory.mktemp("small"))
    with family.engine(prefill_chunk=CONTEXT // 2) as engine:
        yield engine


@pytest.mark.parametrize("num_prompt", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 128, 5000])
def test_prompts_around_the_context(small: Engine, num_prompt: int) -> None:
    """LC-01, LC-04: served when there is room for a token more, refused at once with numbers
    otherwise, never clipped; the next request works."""
    ids = text(num_prompt)
    if num_prompt < CONTEXT:
        (step,) = small.generate_ids(ids, stop_ids=frozenset())
        assert step.finish_reason is not None
        assert step.token_id == int(small.logits(ids)[-1].argmax())
    else:
        with pytest.raises(RequestError, match=rf"{num_prompt} .*the context of {CONTEXT}") as e:
            small.generate_ids(ids)  # before the first token is asked for
        assert "--context" in (e.value.hint or "")
    assert len(list(small.generate_ids(text(4), max_tokens=8, stop_ids=frozenset()))) == 8


def test_answers_fill_the_context_and_no_more(small: Engine) -> None:
    answer = list(small.generate_ids(text(40), stop_ids=frozenset()))
    assert len(answer) == CONTEXT - 40
    with pytest.raises(RequestError, match="40 prompt tokens and 25 new ones"):
        small.generate_ids(text(40), max_tokens=CONTEXT - 40 + 1)


def test_logits_of_texts_around_the_context(small: Engine) -> None:
    assert small.logits(text(CONTEXT)).shape[0] == CONTEXT
    with pytest.raises(RequestError, match=rf"{CONTEXT + 1} tokens do not fit"):
        small.logits(text(CONTEXT + 1))
    assert bool(torch.isfinite(small.logits(text(3))).all())
