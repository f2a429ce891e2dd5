"""The embedded model against stock transformers: text, logits, and bounds that can fail."""

from __future__ import annotations

import pytest
import torch

from families import Pocket, continuation_bound, difference
from hotset.runtime.engine import Engine
from hotset.runtime.verify import divergence, divergence_bound, logit_bound, placements

NUM_NEW = 64
PROMPTS = (slice(0, 40), slice(100, 101))


@pytest.fixture(scope="module")
def engine(pocket: Pocket):
    """Half of the experts in slots, and no policy that would move them."""
    with pocket.engine(context_tokens=384, prefill_chunk=384, policy="none") as engine:
        yield engine


def stock_greedy(pocket: Pocket, prompt: list[int]) -> list[int]:
    """What stock `generate` answers, end ids or not."""
    out = pocket.stock_model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=NUM_NEW,
        min_new_tokens=NUM_NEW,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


@pytest.mark.parametrize("where", PROMPTS)
def test_greedy_text_is_stocks_token_for_token(
    pocket: Pocket, engine: Engine, where: slice
) -> None:
    prompt = pocket.ids[where]
    answer = [
        step.token_id
        for step in engine.generate_ids(prompt, max_tokens=NUM_NEW, stop_ids=frozenset())
    ]
    assert answer == stock_greedy(pocket, prompt)


def test_logits_of_a_text(pocket: Pocket, engine: Engine) -> None:
    got = engine.logits(pocket.ids)
    assert difference(got, pocket.want_TV) <= logit_bound(engine, pocket.want_TV)
    assert torch.equal(got.argmax(dim=-1), pocket.want_TV.argmax(dim=-1))


def test_logits_token_by_token(pocket: Pocket) -> None:
    """The text fed in single tokens, as decoding does."""
    num_tokens = 80
    with pocket.engine(context_tokens=128, prefill_chunk=1, policy="none") as engine:
        got = engine.logits(pocket.ids[:num_tokens])
        want = pocket.want_TV[:num_tokens]
        assert difference(got, want) <= continuation_bound(engine, want)


def scaled(engine: Engine) -> None:
    """One layer's second projections, wrong by half a rounding of bfloat16."""
    for expert in range(engine.geometry.layers[3].num_experts):
        engine.store.fields(3, expert)["down"].mul_(1 + 2**-9)


def swapped(engine: Engine) -> None:
    """One expert computes what another should."""
    engine.store.table.address[5, 7] = engine.store.table.address[5, 8]


def flipped(engine: Engine) -> None:
    """One bit of one weight of an expert that the text uses."""
    engine.store.arena.record(0, 0)[3] ^= 0x40  # the exponent's highest bit of the first weight


@pytest.mark.parametrize("fault", [scaled, swapped, flipped])
def test_the_bound_catches_small_faults(pocket: Pocket, fault) -> None:
    with pocket.engine(share=0.0, context_tokens=384, prefill_chunk=384) as engine:
        fault(engine)
        got = engine.logits(pocket.ids)
        assert not difference(got, pocket.want_TV) <= logit_bound(engine, pocket.want_TV)


def test_sixteen_bits_diverge_little(pocket: Pocket) -> None:
    """BF16 against stock in FP32, and the control: one layer's gate and up halves swapped."""
    bfloat16 = pocket.with_dtype("bfloat16")
    with bfloat16.engine(context_tokens=384, prefill_chunk=384, policy="none") as engine:
        got = engine.logits(pocket.ids)
        assert divergence(got, pocket.want_TV) <= divergence_bound(engine)
        for _, placement in placements(engine):
            engine.place(placement)
            assert torch.equal(engine.logits(pocket.ids), got)
        for expert in range(engine.geometry.layers[1].num_experts):
            gate, up = engine.store.fields(1, expert)["up"].chunk(2)
            gate[:], up[:] = up.clone(), gate.clone()
        _, nothing_resident = next(placements(engine))
        engine.place(nothing_resident)
        wrong = engine.logits(pocket.ids)
        assert divergence(wrong, pocket.want_TV) > divergence_bound(engine)
