"""Staged records go into slots in one launch: every byte, the right one, and no other slot.

On a CPU the device's kernel runs in Triton's interpreter, on a GPU it is what runs anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from records import layers, make_store, record_bytes

from hotset.experts import ring
from hotset.experts.ring import Staged
from hotset.experts.slots import POISON
from hotset.experts.store import ExpertStore
from hotset.experts.transfer import PLACE_BYTES
from hotset.kernels.copy_kernel import launch_copy
from hotset.kernels.gather import copy_records
from kernels.support import DEVICE

NUM_EXPERTS = 72
# A group of more than fit one launch.
GROUP = list(range(1, 71))
Copy = Callable[[torch.Tensor, torch.Tensor, int], None]
BOTH = pytest.mark.parametrize("copy", [copy_records, launch_copy])


@pytest.fixture(scope="module")
def store() -> Iterator[ExpertStore]:
    moe = layers(NUM_EXPERTS)
    staging_records = 2 * len(GROUP)
    with make_store(moe, NUM_EXPERTS, staging_records=staging_records, device=DEVICE) as store:
        yield store


@pytest.fixture
def staged(store: ExpertStore) -> Iterator[Staged]:
    for slot in range(NUM_EXPERTS):
        store.slots.release(slot)  # poisons it
    size = store.layers[0].expert.record_bytes
    staged = store.ring.stage(0, GROUP, record_bytes=size)
    store.ring.wait(staged)
    yield staged
    store.ring.release(staged)


def pairs_of(num: int) -> tuple[list[int], list[int]]:
    """So many staged experts, in no order, and a slot for each."""
    source = torch.Generator().manual_seed(num)
    experts = [GROUP[place] for place in torch.randperm(len(GROUP), generator=source)[:num]]
    return experts, torch.randperm(NUM_EXPERTS, generator=source)[:num].tolist()


def wrong_slots(store: ExpertStore, experts: list[int], where: list[int]) -> list[int]:
    """Slots that hold something else than these experts' records, or than nothing."""
    owner = dict(zip(where, experts, strict=True))
    wrong = []
    for slot in range(NUM_EXPERTS):
        found = store.slots.view(slot).cpu()
        want = record_bytes(store, 0, owner[slot]) if slot in owner else None
        if not torch.equal(found, torch.full_like(found, POISON) if want is None else want):
            wrong.append(slot)
    return wrong


@BOTH
@pytest.mark.parametrize(("num", "launches"), [(0, 0), (1, 1), (5, 1), (64, 1), (70, 2)])
def test_each_record_is_in_its_slot(
    store: ExpertStore,
    staged: Staged,
    monkeypatch: pytest.MonkeyPatch,
    copy: Copy,
    num: int,
    launches: int,
) -> None:
    seen, uploads = [], []

    def watched(sources_N: torch.Tensor, targets_N: torch.Tensor, nbytes: int) -> None:
        seen.append((sources_N.data_ptr() % 16, targets_N.data_ptr() % 16))
        copy(sources_N, targets_N, nbytes)

    send = ring.sent

    def sent(array: Any, device: torch.device) -> torch.Tensor:
        uploads.append(array.nbytes)
        return send(array, device)

    monkeypatch.setattr(ring, "copy_records", watched)
    monkeypatch.setattr(ring, "sent", sent)
    experts, where = pairs_of(num)
    store.ring.copy_to_slots(staged, experts, store.slots, where)
    assert wrong_slots(store, experts, where) == []
    assert seen == [(0, 0)] * launches, "aligned alike, so that one program serves any number"
    assert len(uploads) == launches and all(nbytes <= PLACE_BYTES for nbytes in uploads)


@BOTH
def test_control_a_swapped_pair_shows(
    store: ExpertStore, staged: Staged, monkeypatch: pytest.MonkeyPatch, copy: Copy
) -> None:
    def swapped(sources_N: torch.Tensor, targets_N: torch.Tensor, nbytes: int) -> None:
        order = [1, 0, *range(2, len(targets_N))]
        copy(sources_N, targets_N[order], nbytes)

    monkeypatch.setattr(ring, "copy_records", swapped)
    experts, where = pairs_of(5)
    store.ring.copy_to_slots(staged, experts, store.slots, where)
    assert wrong_slots(store, experts, where) == sorted(where[:2])
