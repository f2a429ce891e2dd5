"""Prompts on whole engines: chunks with the layers outermost, records through the ring, long ones.

A CPU reads the arena in place by default; here it is made to stage records as a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from families import Family, Pocket, continuation_bound, difference, make_family, stock_logits, text
from hotset.models.seam import experts_modules
from hotset.runtime.engine import Engine
from hotset.runtime.prefill import BetweenLayers, run_together
from tiny import tiny_config

CHUNK = 72
LENGTH = 2 * CHUNK + 41
SIZES = {"prefill_chunk": CHUNK, "context_tokens": 256}
# 3 layers of 16 experts, 4 of them used by a token.
FIELDS = {"num_hidden_layers": 3, "num_local_experts": 16, "num_experts_per_tok": 4}


def taken_in(engine: Engine, ids: list[int], between: BetweenLayers | None = None) -> torch.Tensor:
    """Logits of the last token, [V]: all chunks together, as an engine does it."""
    with engine.steps.exclusive(), engine._sequence(len(ids)) as sequence:
        return engine._take_in(sequence, ids, between).clone()


def chunk_by_chunk(engine: Engine, ids: list[int], size: int = CHUNK) -> torch.Tensor:
    """The same with each chunk through all layers before the next one begins."""
    run = partial(
        run_together,
        modules=list(experts_modules(engine.model).values()),
        experts=lambda layer, blocks: engine._runners[layer].run(blocks),
    )
    with engine.steps.exclusive(), engine._sequence(len(ids)) as sequence:
        for start in range(0, len(ids), size):
            logits_V = sequence.take_in([ids[start : start + size]], run)
        return logits_V.clone()


def answer(engine: Engine, ids: list[int], num_tokens: int = 8) -> list[int]:
    steps = engine.generate_ids(ids, max_tokens=num_tokens, stop_ids=frozenset())
    return [step.token_id for step in steps]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    config = tiny_config("qwen3_moe")
    values = {**config.to_dict(), **FIELDS}
    values = {k: v for k, v in values.items() if k not in ("layer_types", "mlp_layer_types")}
    values.pop("model_type")
    folder = tmp_path_factory.mktemp("prompts")
    return make_family("qwen3_moe", folder, config=type(config)(**values))


@pytest.fixture(scope="module")
def in_place(family: Family) -> tuple[torch.Tensor, list[int]]:
    """Logits behind a prompt of three chunks, the last a short one, and an answer: no slots."""
    with family.engine(share=0.0, policy="none", **SIZES) as engine:
        assert engine.store.ring.nbytes == 0
        return taken_in(engine, text(LENGTH)), answer(engine, text(LENGTH))


@pytest.fixture(scope="module")
def staged(family: Family) -> Iterator[Engine]:
    """A quarter of the experts in slots, the others in groups of three through the ring."""
    with family.engine(num_slots=12, staging="ring", **SIZES) as engine:
        assert engine.plan.staging_records == 2 * 3
        yield engine


def test_ring_tee_and_order_of_layers_change_no_bit(
    staged: Engine, in_place: tuple[torch.Tensor, list[int]]
) -> None:
    ids, (want_V, greedy) = text(LENGTH), in_place
    moved = 0
    for seed in range(2, 5):  # slots change hands with every prompt
        taken_in(staged, text(LENGTH, seed=seed))
        before = staged.store.placement.slot_of.copy()
        assert torch.equal(taken_in(staged, ids), want_V)
        moved += int((staged.store.placement.slot_of != before).sum())
        assert staged.store.audit() == []
        assert answer(staged, ids) == greedy
        assert torch.equal(chunk_by_chunk(staged, ids), want_V)
        assert staged.store.audit() == []
    assert moved > 0


@pytest.mark.parametrize("num_slots", [1, 24])
def test_any_ring(family: Family, in_place: tuple[torch.Tensor, list[int]], num_slots: int) -> None:
    """Records one by one, and in larger groups."""
    with family.engine(num_slots=num_slots, staging="ring", policy="lru", **SIZES) as engine:
        assert torch.equal(taken_in(engine, text(LENGTH)), in_place[0])
        assert answer(engine, text(LENGTH)) == in_place[1]
        assert engine.store.audit() == []


def test_the_embedded_model(pocket: Pocket) -> None:
    """In BF16, as it is stored."""
    stored, ids = pocket.with_dtype("bfloat16"), pocket.ids[:100]
    with stored.engine(share=0.0, policy="none", **SIZES) as engine:
        want_V = taken_in(engine, ids)
    with stored.engine(share=0.25, staging="ring", **SIZES) as engine:
        assert torch.equal(taken_in(engine, ids), want_V)
        assert engine.store.audit() == []


def test_each_record_crosses_once_for_the_whole_prompt(staged: Engine) -> None:
    """Against a chunk after the other, where each one brings what it uses."""
    record = staged.geometry.layers[0].expert.record_bytes

    def crossed(run: Callable[[Engine, list[int]], object]) -> tuple[int, int]:
        """Records that were copied, and those that were used and had no slot."""
        before, copied = staged.traffic, staged.store.ring.copied_bytes
        run(staged, text(LENGTH))
        spent = staged.traffic.minus(before)
        return (staged.store.ring.copied_bytes - copied) // record, spent.used - spent.hits

    together, missed = crossed(taken_in)
    assert missed <= together <= missed + 2 * 3, "a group may be sent ahead for each next layer"
    apart, _ = crossed(chunk_by_chunk)
    assert apart > 1.5 * together, "the last chunk is short"


def test_the_books_of_a_prompt(staged: Engine) -> None:
    """Uses, hits and bytes are those of the placement that each layer ran with."""
    before = staged.traffic
    taken_in(staged, text(LENGTH))
    spent = staged.traffic.minus(before)
    assert spent.steps == 1 and 36 <= spent.used <= 48 and 0 < spent.hits <= 12
    record = staged.geometry.layers[0].expert.record_bytes
    assert spent.link_bytes == (spent.used - spent.hits) * record


def test_what_decodes_next_has_the_slots(staged: Engine) -> None:
    """PP-04: more of the experts that the end of the prompt used have slots than before it, and no
    slot is lost. Not all: those whose turn comes early find slots that are still to be read."""
    before = after = 0
    for seed in range(6, 9):
        owned = [set(staged.store.placement.residents(layer).tolist()) for layer in range(3)]
        taken_in(staged, text(LENGTH, seed=seed))
        for layer, earlier in enumerate(owned):
            owners = set(staged.store.placement.residents(layer).tolist())
            best = set((-staged.policy.scores(layer)).argsort()[: len(owners)].tolist())
            assert len(owners) == len(earlier)
            before, after = before + len(earlier & best), after + len(owners & best)
    assert after >= before + 3


def test_a_prompt_that_breaks_off_leaves_the_slots_right(
    staged: Engine, in_place: tuple[torch.Tensor, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two layers, and in the middle of one whose records are already in slots."""
    hooks = iter((None, ZeroDivisionError))

    def between() -> None:
        if error := next(hooks):
            raise error

    restored, restore = [], staged.store.restore
    monkeypatch.setattr(staged.store, "restore", lambda: restored.append(restore()))
    with pytest.raises(ZeroDivisionError):
        taken_in(staged, text(LENGTH, seed=10), between)
    assert staged.store.audit() == []
    assert not restored, "nothing was torn, and all slots once more take seconds"
    monkeypatch.setattr(staged.store, "hand_over", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        taken_in(staged, text(LENGTH, seed=11))
    assert len(restored) == 1
    monkeypatch.undo()
    assert staged.store.audit() == []
    assert torch.equal(taken_in(staged, text(LENGTH)), in_place[0])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_long_context_is_prefilled_to_its_end(model_type: str, tmp_path: Path) -> None:
    """2,047 of 2,048 tokens in chunks of 300, windows and sinks included, near stock; then it
    answers. Chunks together or apart are the same bits."""
    config = tiny_config(model_type)
    values = config.to_dict() | {"max_position_embeddings": 2048, "num_hidden_layers": 2}
    for name in ("layer_types", "mlp_layer_types", "model_type"):
        values.pop(name, None)
    family = make_family(model_type, tmp_path, config=type(config)(**values))
    ids = text(2047)
    want_V = stock_logits(family.stock(), ids)[-1:]
    sizes = {"context_tokens": 2048, "prefill_chunk": 300}
    with family.engine(staging="ring", **sizes) as engine:
        got_V = taken_in(engine, ids)
        assert difference(got_V, want_V[0]) <= continuation_bound(engine, want_V)
        assert answer(engine, ids, 1) == [int(got_V.argmax())]
        assert torch.equal(chunk_by_chunk(engine, ids, 300), got_V)
