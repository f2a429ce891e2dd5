"""Slots and the address table: memory by record size, poison, and where a kernel is sent."""

from __future__ import annotations

import pytest
import torch
from records import CPU, expert, layers, pools_of

from hotset.core.record import ALIGN_BYTES
from hotset.experts.slots import POISON, SlotMemory
from hotset.experts.table import AddressTable

SMALL, LARGE = expert(), expert(72, 28)
TWO_SIZES = layers(6, 4, experts=[SMALL, LARGE])


def two_pools(*, poison: bool = False) -> SlotMemory:
    """Slots 0..2 of the small size, 3..4 of the large one."""
    pools = pools_of(TWO_SIZES, {SMALL.record_bytes: 3, LARGE.record_bytes: 2})
    return SlotMemory(pools, device=CPU, poison=poison)


def test_every_slot_has_room_for_its_record_and_no_more() -> None:
    slots = two_pools()
    sizes = [SMALL.record_bytes] * 3 + [LARGE.record_bytes] * 2
    assert slots.num_slots == 5
    assert slots.nbytes == sum(sizes)
    assert [slots.view(slot).numel() for slot in range(5)] == sizes
    for slot in range(5):
        slots.view(slot).fill_(slot + 1)
    for slot in range(5):
        assert bool((slots.view(slot) == slot + 1).all()), "slots overlap"


def test_a_slots_address_is_where_its_bytes_are() -> None:
    slots = two_pools()
    for slot in range(5):
        assert slots.address(slot) == slots.view(slot).data_ptr()
        # A CPU allocator aligns to 64 bytes, which the kernels' contract asks for; sizes of 128
        # keep it for every slot.
        assert slots.address(slot) % 64 == 0
        assert slots.view(slot).numel() % ALIGN_BYTES == 0


def test_neighbours_are_in_one_pool_and_one_behind_the_other() -> None:
    slots = two_pools()
    pairs = {(a, b) for a in range(5) for b in range(5) if slots.neighbours(a, b)}
    assert pairs == {(0, 1), (1, 2), (3, 4)}
    slots.view(0).fill_(1)
    slots.view(1).fill_(2)
    assert torch.equal(slots.view(0, 2), torch.cat([slots.view(0), slots.view(1)]))


def test_no_slots_at_all() -> None:
    slots = SlotMemory(pools_of(TWO_SIZES, {}), device=CPU, poison=True)
    assert slots.num_slots == slots.nbytes == 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_poison_is_nan_in_every_dtype(dtype: torch.dtype) -> None:
    slots = two_pools(poison=True)
    for slot in range(5):
        assert bool(slots.view(slot).view(dtype).float().isnan().all())


def test_a_released_slot_is_poisoned_where_that_is_asked_for() -> None:
    for poison in (True, False):
        slots = two_pools(poison=poison)
        for slot in range(5):
            slots.view(slot).fill_(9)
        slots.release(1)
        assert set(slots.view(1).tolist()) == {POISON if poison else 9}
        assert set(slots.view(0).tolist()) == set(slots.view(2).tolist()) == {9}


def table_of(*num_experts: int) -> AddressTable:
    """Host address of expert e of layer l: 1000 l + e + 1."""
    return AddressTable(
        layers(*num_experts), lambda layer, index: 1000 * layer + index + 1, device=CPU
    )


def test_a_fresh_table_points_to_the_host() -> None:
    table = table_of(3, 2)
    assert table.row(0).tolist() == [1, 2, 3]
    assert table.row(1).tolist() == [1001, 1002], "no row beyond a layer's experts"
    assert torch.equal(table.address, table.host_address)
    assert table.address.data_ptr() != table.host_address.data_ptr()


def test_a_row_is_always_current() -> None:
    table = table_of(3, 2)
    row = table.row(0)
    table.retarget({(0, 1): 77, (1, 0): 88})
    assert row.tolist() == [1, 77, 3]
    assert row.is_contiguous()
    table.retarget({(0, 1): None})
    assert row.tolist() == [1, 2, 3]
    assert table.row(1).tolist() == [88, 1002], "what is not named stays"
    assert table.host_address[0].tolist() == [1, 2, 3]
