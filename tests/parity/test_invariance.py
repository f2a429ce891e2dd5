"""Where experts lie changes no bit: budgets, placements, policies, histories; and the controls.

The embedded model in BF16, as it is stored. Every free slot holds NaN, so that an address that
points to one shows at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from families import Family, Pocket
from hotset.core.errors import RequestError
from hotset.core.placement import Placement
from hotset.runtime.engine import Engine

NUM_TOKENS = 48
# Policies that need nothing but the model.
MOVING = ("half-life", "lru")


@pytest.fixture(scope="module")
def stored(pocket: Pocket) -> Family:
    return pocket.with_dtype("bfloat16")


@pytest.fixture(scope="module")
def reference(stored: Family, pocket: Pocket) -> tuple[torch.Tensor, list[int]]:
    """Logits of a text and a greedy answer with nothing in slots."""
    with stored.engine(share=0.0, policy="none") as engine:
        assert engine.plan.num_slots == 0
        return engine.logits(prompt(pocket)), answer(engine, pocket)


def prompt(pocket: Pocket) -> list[int]:
    return pocket.ids[: NUM_TOKENS // 2]


def answer(engine: Engine, pocket: Pocket) -> list[int]:
    steps = engine.generate_ids(prompt(pocket), max_tokens=NUM_TOKENS // 2, stop_ids=frozenset())
    return [step.token_id for step in steps]


def random_placement(engine: Engine, seed: int) -> Placement:
    """Slots at random experts of any layer, some left free."""
    rng = np.random.default_rng(seed)
    placement = Placement(engine.pools)
    layers = engine.geometry.layers
    everyone = [(i, e) for i, layer in enumerate(layers) for e in range(layer.num_experts)]
    for index in rng.permutation(len(everyone)):
        layer, expert = everyone[index]
        if placement.num_free(layer) and rng.random() < 0.9:
            placement.assign(layer, expert)
    return placement


@pytest.mark.parametrize("share", [0.0, 1 / 6, 0.37, 1.0])
def test_any_budget(stored: Family, pocket: Pocket, reference, share: float) -> None:
    """No slot, one layer's worth, 37% and all of the experts."""
    want, greedy = reference
    with stored.engine(share=share, policy="none") as engine:
        assert engine.plan.num_slots == int(share * engine.geometry.num_records)
        for seed in range(3):
            engine.place(random_placement(engine, seed))
            assert engine.store.audit() == []
            assert torch.equal(engine.logits(prompt(pocket)), want)
        assert answer(engine, pocket) == greedy


@pytest.mark.parametrize("policy", ["none", *MOVING])
def test_any_policy(stored: Family, pocket: Pocket, reference, policy: str) -> None:
    """Slots change hands while it decodes, or never do."""
    want, greedy = reference
    with stored.engine(share=0.25, policy=policy) as engine:
        before = engine.store.placement.slot_of.copy()
        assert answer(engine, pocket) == greedy
        assert torch.equal(engine.logits(prompt(pocket)), want)
        moved = not np.array_equal(engine.store.placement.slot_of, before)
        assert moved == (policy in MOVING)
        assert engine.store.audit() == []


@pytest.mark.parametrize("half_life", [0.5, 8.0])
def test_any_half_life(stored: Family, pocket: Pocket, reference, half_life: float) -> None:
    want, greedy = reference
    with stored.engine(share=0.1, policy="half-life", half_life=half_life) as engine:
        for _ in range(2):
            assert answer(engine, pocket) == greedy
        assert torch.equal(engine.logits(prompt(pocket)), want)
        assert engine.store.audit() == []


def test_placements_that_change_between_steps(stored: Family, pocket: Pocket, reference) -> None:
    _, greedy = reference
    with stored.engine(share=0.37, policy="none") as engine:
        got = []
        for step in engine.generate_ids(
            prompt(pocket), max_tokens=NUM_TOKENS // 2, stop_ids=frozenset()
        ):
            got.append(step.token_id)
            engine.place(random_placement(engine, len(got)))
            assert engine.store.audit() == []
        assert got == greedy


@pytest.fixture
def broken(stored: Family) -> Iterator[Engine]:
    """An engine for breaking: all experts in slots but one layer's."""
    with stored.engine(share=1.0, policy="none") as engine:
        placement = Placement(engine.pools)
        for layer in range(5):
            for expert in range(32):
                placement.assign(layer, expert)
        engine.place(placement)
        yield engine


def test_the_control_a_wrong_address_shows(broken: Engine, pocket: Pocket, reference) -> None:
    """In a slot and in the host arena."""
    want, _ = reference
    table = broken.store.table.address
    for layer in (0, 5):
        kept = table.clone()
        table[layer] = table[layer].roll(1)
        assert not torch.equal(broken.logits(prompt(pocket)), want)
        table.copy_(kept)
        assert torch.equal(broken.logits(prompt(pocket)), want)


def test_the_control_a_flipped_bit_shows(broken: Engine, pocket: Pocket, reference) -> None:
    """Of every expert of a layer, in its slot and in the arena: a text does not use them all."""
    want, _ = reference
    for layer in (2, 5):
        for expert in range(32):
            _record(broken, layer, expert)[5] ^= 0x10
        assert not torch.equal(broken.logits(prompt(pocket)), want)
        for expert in range(32):
            _record(broken, layer, expert)[5] ^= 0x10
        assert torch.equal(broken.logits(prompt(pocket)), want)


def _record(engine: Engine, layer: int, expert: int) -> torch.Tensor:
    """What is read of an expert: its slot where it has one."""
    slot = int(engine.store.placement.slot_of[layer, expert])
    return engine.store.slots.view(slot) if slot >= 0 else engine.store.arena.record(layer, expert)


def test_the_control_a_free_slot_that_is_read_shows(broken: Engine, pocket: Pocket) -> None:
    free = next(s for s in range(192) if broken.store.placement.owner(s) is None)
    broken.store.table.address[5] = broken.store.slots.address(free)
    assert not bool(torch.isfinite(broken.logits(prompt(pocket))).all())
    with pytest.raises(RequestError, match="not finite"):
        answer(broken, pocket)
