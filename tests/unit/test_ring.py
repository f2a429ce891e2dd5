"""The ring: what is copied, in how many copies, and where it lies then."""

from __future__ import annotations

import pytest
import torch
from records import layers, make_store, record_bytes, resident

from hotset.core.errors import CapacityError
from hotset.experts.ring import Fill
from hotset.experts.store import ExpertStore
from hotset.kernels.reference import read_record


def count_copies(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(layer, first expert, records) of every copy that follows."""
    copies: list[tuple[int, int, int]] = []
    take = store.arena.record

    def record(layer: int, index: int, num_records: int = 1) -> torch.Tensor:
        copies.append((layer, index, num_records))
        return take(layer, index, num_records)

    monkeypatch.setattr(store.arena, "record", record)
    return copies


def test_neighbours_go_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(layers(6, 6), 8)
    copies = count_copies(store, monkeypatch)
    fills = [Fill(0, 1, 2), Fill(0, 2, 3), Fill(0, 3, 4), Fill(0, 5, 5), Fill(1, 0, 6)]
    store.ring.fill(fills[::-1], store.slots)
    assert copies == [(0, 1, 3), (0, 5, 1), (1, 0, 1)]
    assert store.ring.copied_bytes == 5 * store.layers[0].expert.record_bytes
    for fill in fills:
        want = record_bytes(store, fill.layer, fill.expert)
        assert torch.equal(store.slots.view(fill.slot), want)


def test_neighbours_in_memory_only_are_not_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adjacent experts in slots in another order, and the last and first expert of two layers."""
    store = make_store(layers(4, 4), 8)
    copies = count_copies(store, monkeypatch)
    store.ring.fill([Fill(0, 0, 1), Fill(0, 1, 0), Fill(0, 3, 2), Fill(1, 0, 3)], store.slots)
    assert copies == [(0, 0, 1), (0, 1, 1), (0, 3, 1), (1, 0, 1)]


@pytest.mark.parametrize("num_buffers", [2, 3])
def test_staged_records_are_where_their_addresses_say(num_buffers: int) -> None:
    store = make_store(layers(12), staging_records=4 * num_buffers, num_buffers=num_buffers)
    size = store.layers[0].expert.record_bytes
    ring = store.ring
    assert ring.room(size) == 4 and ring.num_idle == num_buffers
    held = [ring.stage(0, [i, i + 2, i + 3], record_bytes=size) for i in range(num_buffers)]
    assert ring.num_idle == 0
    for staged in held:
        ring.wait(staged)
        for place, index in enumerate(staged.experts):
            bytes_ = read_record(staged.address + place * size, size, store.device)
            assert torch.equal(bytes_, record_bytes(store, 0, index))
    for staged in held[::-1]:
        ring.release(staged)
    assert ring.num_idle == num_buffers
    assert ring.copied_bytes == 3 * num_buffers * size


def test_neighbours_within_a_group_go_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(layers(12), staging_records=12)
    copies = count_copies(store, monkeypatch)
    store.ring.stage(0, [2, 3, 4, 7, 8, 9], record_bytes=store.layers[0].expert.record_bytes)
    assert copies == [(0, 2, 3), (0, 7, 3)]


def test_a_buffer_whose_copies_are_interrupted_stays_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(layers(12), staging_records=12)
    ring, size = store.ring, store.layers[0].expert.record_bytes
    take = store.arena.record

    def record(layer: int, index: int, num_records: int = 1) -> torch.Tensor:
        if index == 7:
            raise KeyboardInterrupt
        return take(layer, index, num_records)

    monkeypatch.setattr(store.arena, "record", record)
    for _ in range(3):  # more often than there are buffers
        with pytest.raises(KeyboardInterrupt):
            ring.stage(0, [2, 3, 7], record_bytes=size)
    monkeypatch.undo()
    assert ring.num_idle == 2
    staged = ring.stage(0, [7], record_bytes=size)
    assert torch.equal(read_record(staged.address, size, store.device), record_bytes(store, 0, 7))


def test_a_staged_record_is_copied_to_a_slot() -> None:
    store = make_store(layers(6), 3, staging_records=6)
    staged = store.ring.stage(0, [1, 4], record_bytes=store.layers[0].expert.record_bytes)
    store.ring.copy_to_slots(staged, [4], store.slots, [2])
    assert torch.equal(store.slots.view(2), record_bytes(store, 0, 4))
    assert store.ring.copied_bytes == 2 * store.layers[0].expert.record_bytes, "no link bytes"


def test_more_owners_than_slots_is_refused() -> None:
    store = make_store(layers(16), 2)
    with pytest.raises(CapacityError, match="no free slot"):
        resident(store, {0: [1, 2, 3]})
