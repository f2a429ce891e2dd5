"""Experts without a host copy: the same bits, slots that they keep, and checks that see them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from families import Pocket, open_pocket
from hotset.checkpoint import filling
from hotset.core.placement import Placement
from hotset.runtime.engine import Engine
from hotset.runtime.verify import (
    check_decode,
    check_placements,
    check_records,
    check_slots,
    placements,
)

KEPT = (4, 0, 16, 1, 4, 4)
"""Of 32 experts and 16 slots in each of six layers."""

LONG = {"context_tokens": 160, "prefill_chunk": 160}


@pytest.fixture(scope="module")
def pocket() -> Pocket:
    return open_pocket()


def short_engine(pocket: Pocket, **options: object) -> Engine:
    """An engine whose host memory has no room for the last experts of some layers."""
    with pocket.engine(share=0.5, **options) as roomy:
        planned = roomy.machine, replace(roomy.plan, slot_only_per_layer=KEPT)
        return Engine(pocket.source, roomy.config, planned=planned)


@pytest.mark.parametrize("staging", ["in-place", "ring"])
def test_no_bit_depends_on_where_the_only_copy_is(pocket: Pocket, staging: str) -> None:
    """128 tokens are more than are matched, so that with `ring` the missing ones are staged."""
    with pocket.engine(share=0.5, staging=staging, **LONG) as roomy:
        want = roomy.logits(pocket.ids[:128])
        tokens = [t.token_id for t in roomy.generate_ids(pocket.ids[:20], max_tokens=24)]
        num_records = roomy.geometry.num_records
        record_bytes = roomy.store.arena.nbytes // num_records
    with short_engine(pocket, staging=staging, **LONG) as engine:
        store = engine.store
        assert store.arena.nbytes == (num_records - sum(KEPT)) * record_bytes
        before = store.placement.slot_of.copy()
        pinned = store.placement.pinned
        assert pinned.sum(axis=1).tolist() == list(KEPT)
        # The slots beside them have owners too, as many as there are.
        assert store.placement.resident.sum(axis=1).tolist() == [16] * 6
        assert torch.equal(engine.logits(pocket.ids[:128]), want)
        assert [t.token_id for t in engine.generate_ids(pocket.ids[:20], max_tokens=24)] == tokens
        # The policy has moved others, and none of these.
        assert np.array_equal(store.placement.slot_of[pinned], before[pinned])
        assert not np.array_equal(store.placement.slot_of, before)
        store.placement.check()
        # A step that broke off: everything but these is written anew.
        store.restore()
        assert store.audit() == [] and torch.equal(engine.logits(pocket.ids[:128]), want)


def test_verify_finds_them_where_they_are(pocket: Pocket) -> None:
    with short_engine(pocket) as engine:
        checks = [
            check_records(engine, pocket.source),
            check_slots(engine),
            check_placements(engine, pocket.ids[:32]),
            check_decode(engine, pocket.ids[:16]),
        ]
        assert all(check.ok for check in checks), checks
        for name, placement in placements(engine):
            same = (
                placement.slot_of[placement.pinned]
                == engine.store.placement.slot_of[engine.store.placement.pinned]
            )
            assert same.all(), name
        # The control: one bit of a record that lies in a slot alone.
        engine.store.record(0, 31)[7] ^= 1
        wrong = check_records(engine, pocket.source)
        assert wrong.ok is False and "expert 31 differs from the checkpoint" in wrong.detail


def test_they_cannot_lose_their_slots(pocket: Pocket) -> None:
    with short_engine(pocket) as engine:
        with pytest.raises(AssertionError, match="has no host copy"):
            engine.store.placement.evict(0, 31)
        nobody = Placement(engine.pools)
        assert nobody.resident.sum() == sum(KEPT)
        engine.place(nobody)
        assert engine.store.audit() == []


def test_a_record_on_the_device_is_loaded_through_host_memory(
    pocket: Pocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where files cannot be read into a slot."""
    with pocket.engine(share=0.5) as roomy:
        want = roomy.logits(pocket.ids[:32])
    monkeypatch.setattr(filling, "_in_host_memory", lambda tensor: False)
    with short_engine(pocket) as engine:
        assert torch.equal(engine.logits(pocket.ids[:32]), want)
