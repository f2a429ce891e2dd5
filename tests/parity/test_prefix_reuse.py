"""Prefixes that are reused: bit for bit what is computed anew where forwards are cut alike, and
within what another cut may change elsewhere."""

from __future__ import annotations

import logging

import pytest
import torch

from families import Family, continuation_bound, difference, make_family, text
from hotset.core.errors import HardwareError
from hotset.runtime.engine import Engine
from hotset.runtime.kv_blocks import PrefixIndex
from hotset.runtime.requests import Request
from parity.test_indexed import indexed_config
from scheduling import Answers

CHUNK, CONTEXT = 64, 256
FIRST = text(150)
# It goes on differently in the middle of the third chunk.
SECOND = [*FIRST[:140], *text(40, seed=2)]
# Texts whose forwards are cut otherwise where 32 tokens and their multiples are reused.
OTHERS = [SECOND[:101], SECOND[:120], SECOND[:133], SECOND[:170]]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "glm_moe_dsa"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Keys and values, latents, and what is chosen by keys that lie in reused blocks too."""
    name = request.param
    options = {"config": indexed_config(name)} if name == "glm_moe_dsa" else {}
    return make_family(name, tmp_path_factory.mktemp("model"), **options)


def make_engine(
    family: Family, *, reuse: bool = True, exact: bool = False, chunk: int = CHUNK
) -> Engine:
    return family.engine(
        context_tokens=CONTEXT,
        prefill_chunk=chunk,
        max_batch=2,
        batch_invariant=exact,
        prefix_reuse=reuse,
    )


def ask(engine: Engine, *prompts: list[int], max_tokens: int = 6) -> tuple[list[torch.Tensor], int]:
    """Logits [V] of each prompt's last token, one request after the other; prefix tokens reused."""
    logits: list[torch.Tensor] = []
    take_in = engine._take_in

    def watched(*args: object) -> torch.Tensor:
        logits.append(take_in(*args).clone())  # type: ignore[arg-type]
        return logits[-1]

    engine._take_in = watched  # type: ignore[assignment, method-assign]
    got = Answers()
    with engine.scheduling(max_waiting=4) as scheduler:
        for prompt in prompts:
            scheduler.submit(Request(prompt_ids=prompt, max_tokens=max_tokens))
            got.run(scheduler)
        return logits, scheduler.counts().num_prefix_tokens


def test_whole_chunks_are_reused_bit_for_bit(family: Family) -> None:
    """Two chunks of the second prompt are the first's: the same forwards follow, so the same bits
    do. The control: without whole chunks the forwards are others, and so are low bits."""
    with make_engine(family, reuse=False, exact=True) as engine:
        (_, expected), num_reused = ask(engine, FIRST, SECOND)
        assert num_reused == 0
    with make_engine(family, exact=True) as engine:
        (_, again), num_reused = ask(engine, FIRST, SECOND)
        assert num_reused == 2 * CHUNK
    assert torch.equal(again, expected)
    with make_engine(family) as engine:
        (_, *found), num_reused = ask(engine, FIRST[:66], *OTHERS)
        assert num_reused > 0
    with make_engine(family, reuse=False, exact=True) as engine:
        want, _ = ask(engine, *OTHERS)
    assert not all(torch.equal(*pair) for pair in zip(found, want, strict=True))


@pytest.mark.parametrize(("chunk", "num_whole"), [(48, 96), (20, 0), (16, 128)])
def test_short_chunks_are_reused_bit_for_bit(family: Family, chunk: int, num_whole: int) -> None:
    """Of the 140 tokens that two prompts share, as many as are whole chunks and whole blocks of 32.
    What follows is short enough to run chunk by chunk, where without reuse all chunks run together:
    the bits of a chunk depend on its own tokens alone."""
    with make_engine(family, reuse=False, exact=True, chunk=chunk) as engine:
        (_, expected), _ = ask(engine, FIRST, SECOND[:150])
    with make_engine(family, exact=True, chunk=chunk) as engine:
        (_, again), num_reused = ask(engine, FIRST, SECOND[:150])
    assert num_reused == num_whole
    assert torch.equal(again, expected)


def test_a_chunk_is_reused_as_one_forward_made_it(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other texts with the same first block of 32 ran before: their block is not part of it, as the
    experts of those forwards had other tokens beside it. The control: names of single blocks."""
    texts = [text(100, seed=seed) for seed in range(3, 9)]
    with make_engine(family, reuse=False, exact=True) as engine:
        want, _ = ask(engine, *texts)

    def found() -> list[torch.Tensor]:
        """Logits of each text behind another that begins alike, and its own first chunk."""
        with make_engine(family, exact=True) as engine:
            return [logits_behind(engine, ids) for ids in texts]

    def logits_behind(engine: Engine, ids: list[int]) -> torch.Tensor:
        other = [*ids[:32], *text(40, seed=ids[0])]
        (*_, again), num_reused = ask(engine, other, ids[: CHUNK + 1], ids)
        assert num_reused == CHUNK
        return again

    assert all(map(torch.equal, found(), want))

    def chain(self: PrefixIndex, ids: list[int]) -> list[bytes]:
        return [bytes(str(ids[:end]), "ascii") for end in range(32, len(ids) + 1, 32)]

    monkeypatch.setattr(PrefixIndex, "_chain", chain)
    assert not all(map(torch.equal, found(), want))


@pytest.mark.parametrize(("length", "num_reused"), [(64, 32), (65, 64), (66, 64), (97, 96)])
def test_the_same_prompt_again(family: Family, length: int, num_reused: int) -> None:
    """CC-13: of 65 and 97 tokens one is left to take in, and of 64 a block: never none."""
    with make_engine(family, exact=True, chunk=32) as engine:
        prompt = text(length, seed=length)
        (cold, again), reused = ask(engine, prompt, prompt)
    assert reused == num_reused
    assert torch.equal(again, cold)


def test_any_block_is_reused_within_the_bound(family: Family) -> None:
    """An answer's tokens too: a conversation goes on from what decode steps put there."""
    with make_engine(family, reuse=False) as engine:
        want_TV = engine.logits(SECOND[:133])
        bound = continuation_bound(engine, want_TV)
    with make_engine(family) as engine:
        (_, found), num_reused = ask(engine, SECOND[:70], SECOND[:133])
    assert num_reused == 64 and difference(found, want_TV[-1]) <= bound


def test_an_answer_is_part_of_the_next_prompt(family: Family) -> None:
    with make_engine(family) as engine:
        steps = engine.generate_ids(FIRST[:60], max_tokens=50, stop_ids=frozenset())
        whole = [*FIRST[:60], *(step.token_id for step in steps)]
        want_TV = engine.logits([*whole, 7])
        (found,), num_reused = ask(engine, [*whole, 7])
    assert num_reused == 96, "three blocks, the last of them the answer's"
    assert difference(found, want_TV[-1]) <= continuation_bound(engine, want_TV)


def test_wrong_blocks_are_beyond_the_bound(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the bounds: blocks named by their place alone are another text's."""

    def chain(self: PrefixIndex, ids: list[int]) -> list[bytes]:
        return [bytes([end // 32]) for end in range(32, len(ids) + 1, 32)]

    monkeypatch.setattr(PrefixIndex, "_chain", chain)
    with make_engine(family) as engine:
        want_TV = engine.logits(text(133, seed=5))
        (_, found), num_reused = ask(engine, FIRST, text(133, seed=5))
    assert num_reused == 128
    assert difference(found, want_TV[-1]) > continuation_bound(engine, want_TV)


def test_two_that_run_share_what_they_begin_with(family: Family) -> None:
    """The system prompt of two conversations at the same time lies in the pool once."""
    with make_engine(family) as engine, engine.scheduling(max_waiting=4) as scheduler:
        for prompt in (FIRST, SECOND):
            scheduler.submit(Request(prompt_ids=prompt, max_tokens=20))
        got = Answers()
        while len(got.tokens) < 2:
            got.step(scheduler)
        # 150 and 180 tokens: 5 and 6 blocks, 4 of them common.
        assert scheduler.counts().num_blocks_used == 5 + 6 - 4
        got.run(scheduler)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("gpt_oss", "sliding windows keep the newest tokens only"),
        ("qwen3_next", "some layers carry a state"),
        ("minimax", ""),
    ],
)
def test_what_cannot_be_shared_is_said(
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    model_type: str,
    words: str,
) -> None:
    other = make_family(model_type, tmp_path_factory.mktemp("model"))
    with caplog.at_level(logging.WARNING), make_engine(other) as engine:
        _, num_reused = ask(engine, FIRST[:60], FIRST[:60])
    assert num_reused == 0
    assert any(f"prefixes are not reused: {words}" in said for said in caplog.messages)
    with pytest.raises(HardwareError, match=r"prefixes are not reused|one by one|library's cache"):
        other.engine(context_tokens=CONTEXT, prefix_reuse=True, strict=True)
