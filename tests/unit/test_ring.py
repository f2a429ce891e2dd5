"""The ring: what is copied, in how many copies, and that streamed records compute the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from records import expert, layers, make_store, record_bytes, resident, routed, runner

from hotset.core.errors import CapacityError
from hotset.experts.ring import Fill, Group
from hotset.experts.store import ExpertStore
from hotset.kernels.reference import read_record
from hotset.runtime.moe import RING_TOKENS

SMALL, LARGE = expert(), expert(72, 28)
MANY = RING_TOKENS + 7


def count_copies(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(layer, first expert, records) of every copy that follows."""
    copies: list[tuple[int, int, int]] = []
    take = store.arena.record

    def record(layer: int, index: int, num_records: int = 1) -> torch.Tensor:
        copies.append((layer, index, num_records))
        return take(layer, index, num_records)

    monkeypatch.setattr(store.arena, "record", record)
    return copies


def stream(store: ExpertStore, layer: int, experts: Sequence[int]) -> list[Group]:
    """All groups, each checked against the arena while it is valid."""
    groups = []
    spec = store.layers[layer]
    size = spec.expert.record_bytes
    for group in store.ring.stream(layer, experts, num_experts=spec.num_experts, record_bytes=size):
        for index in range(spec.num_experts):
            address = int(group.address_E[index])
            assert (address != 0) == (index in group.experts)
            if address:
                staged = read_record(address, size, store.device)
                assert torch.equal(staged, record_bytes(store, layer, index))
        groups.append(group)
    return groups


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


@pytest.mark.parametrize("staging_records", [2, 3, 4, 7, 40])
@pytest.mark.parametrize("experts", [[], [0], [7, 2], [0, 1, 2, 5, 6, 9, 10, 11], range(12)])
def test_every_record_crosses_once(staging_records: int, experts: Sequence[int]) -> None:
    store = make_store(layers(12), staging_records=staging_records)
    groups = stream(store, 0, experts)
    assert [index for group in groups for index in group.experts] == sorted(experts)
    assert all(len(group.experts) <= staging_records // 2 for group in groups)
    assert store.ring.copied_bytes == len(experts) * store.layers[0].expert.record_bytes
    assert store.ring.nbytes == staging_records // 2 * 2 * store.layers[0].expert.record_bytes


def test_neighbours_within_a_group_go_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(layers(12), staging_records=8)
    copies = count_copies(store, monkeypatch)
    for _ in store.ring.stream(
        0, [2, 3, 4, 7, 8, 9], num_experts=12, record_bytes=store.layers[0].expert.record_bytes
    ):
        pass
    assert copies == [(0, 2, 3), (0, 7, 1), (0, 8, 2)]


def test_the_next_group_is_on_its_way_before_it_is_asked_for() -> None:
    store = make_store(layers(6), staging_records=2)
    size = store.layers[0].expert.record_bytes
    groups = store.ring.stream(0, range(6), num_experts=6, record_bytes=size)
    next(groups)
    assert store.ring.copied_bytes == 2 * size


def test_small_records_use_the_room_of_the_largest() -> None:
    store = make_store(layers(9, 9, experts=[SMALL, LARGE]), {}, staging_records=4)
    per_buffer = 2 * LARGE.record_bytes // SMALL.record_bytes
    assert per_buffer > 2
    assert max(len(group.experts) for group in stream(store, 0, range(9))) == per_buffer
    assert max(len(group.experts) for group in stream(store, 1, range(9))) == 2


def test_a_stream_that_is_left_early_spoils_nothing() -> None:
    store = make_store(layers(8, 8), staging_records=2)
    size = store.layers[0].expert.record_bytes
    for _ in store.ring.stream(0, range(8), num_experts=8, record_bytes=size):
        break
    stream(store, 1, range(8))


@pytest.mark.parametrize("owned", [[], [3], [0, 1, 2, 3], [1, 5, 8, 15], range(16)])
@pytest.mark.parametrize("staging_records", [2, 6])
def test_staged_equals_in_place(owned: Sequence[int], staging_records: int) -> None:
    """MB-06: tokens that touch all 16 experts run in groups, whatever room there is for them."""
    store = make_store(layers(16), len(owned), staging_records=staging_records)
    store.place(resident(store, {0: owned}))
    copied = store.ring.copied_bytes
    staged, in_place = runner(store, use_ring=True), runner(store)
    x_TH, ids_TK, weights_TK = routed(store, MANY)
    assert len(ids_TK.unique()) == 16
    assert torch.equal(staged(x_TH, ids_TK, weights_TK), in_place(x_TH, ids_TK, weights_TK))
    moved = (store.ring.copied_bytes - copied) // store.layers[0].expert.record_bytes
    assert moved == 16 - len(owned), "PP-03: each missing expert moves once"
    assert store.placement.residents(0).tolist() == sorted(owned), "the hot set stays"
    assert store.audit() == []


def test_only_what_is_routed_is_staged() -> None:
    store = make_store(layers(16), 2, staging_records=4)
    store.place(resident(store, {0: [3, 4]}))
    staged, in_place = runner(store, use_ring=True), runner(store)
    x_TH, ids_TK, weights_TK = routed(store, RING_TOKENS)
    ids_TK = ids_TK % 5  # experts 0..4 only, repeated within rows as well
    ids_TK[5] = -1  # padding
    before = store.ring.copied_bytes
    assert torch.equal(staged(x_TH, ids_TK, weights_TK), in_place(x_TH, ids_TK, weights_TK))
    assert store.ring.copied_bytes - before == 3 * store.layers[0].expert.record_bytes


def test_few_tokens_are_read_in_place() -> None:
    store = make_store(layers(16), staging_records=4)
    staged = runner(store, use_ring=True)
    staged(*routed(store, RING_TOKENS - 1))
    assert store.ring.copied_bytes == 0


def test_the_control_a_wrong_staged_byte_shows() -> None:
    store = make_store(layers(16), staging_records=4)
    staged, in_place = runner(store, use_ring=True), runner(store)
    inputs = routed(store, MANY)
    want = in_place(*inputs)
    store.arena.record(0, 7)[:64] = 0
    assert not torch.equal(staged(*inputs), want)


def test_more_owners_than_slots_is_refused() -> None:
    store = make_store(layers(16), 2)
    with pytest.raises(CapacityError, match="no free slot"):
        resident(store, {0: [1, 2, 3]})
