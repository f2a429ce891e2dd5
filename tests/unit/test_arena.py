"""The host arena: where records lie, what it takes, and that it is given back whatever happens."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from records import expert, layers

from hotset.core.errors import CapacityError, HardwareError
from hotset.core.record import ALIGN_BYTES
from hotset.core.units import MIB
from hotset.experts import arena as arena_module
from hotset.experts.arena import HostArena, make_bank


def test_addresses_are_where_the_bytes_are() -> None:
    moe = layers(5, 3, experts=[expert(), expert(40, 8, bias=True)])
    arena = HostArena(moe, pinned=False)
    for layer, spec in enumerate(moe):
        for index in range(spec.num_experts):
            record = arena.record(layer, index)
            assert record.numel() == spec.expert.record_bytes
            assert arena.address(layer, index) == record.data_ptr()
            assert arena.address(layer, index) % ALIGN_BYTES == 0
            record.fill_(16 * layer + index + 1)
            at_address = (ctypes.c_uint8 * record.numel()).from_address(record.data_ptr())
            assert set(at_address) == {16 * layer + index + 1}


def test_records_neither_overlap_nor_leave_gaps() -> None:
    moe = layers(4, 7, 2, experts=[expert(), expert(56, 12), expert()])
    arena = HostArena(moe, pinned=False)
    spans = sorted(
        (arena.offset(layer, index), spec.expert.record_bytes)
        for layer, spec in enumerate(moe)
        for index in range(spec.num_experts)
    )
    end = 0
    for start, size in spans:
        assert start == end
        end = start + size
    assert 0 <= arena.nbytes - end < resource.getpagesize()


def test_neighbours_are_one_stretch_of_memory() -> None:
    moe = layers(6)
    arena = HostArena(moe, pinned=False)
    arena.bytes_.copy_(torch.arange(arena.nbytes) % 251)
    together = arena.record(0, 2, 3)
    assert torch.equal(together, torch.cat([arena.record(0, index) for index in (2, 3, 4)]))


def test_a_layer_without_experts_takes_nothing() -> None:
    """HR-04: an empty bank among others is no error and moves nothing else."""
    arena = HostArena(layers(3, 0, 2), pinned=False)
    assert arena.offset(2, 0) == arena.offset(1, 0) == 3 * expert().record_bytes


def test_banks_that_were_written_before_all_layers_were_known_are_an_arena() -> None:
    moe = layers(5, 3, experts=[expert(), expert(40, 8, bias=True)])
    banks = [make_bank(spec.num_experts, spec.expert.record_bytes) for spec in moe]
    for layer, (bank, spec) in enumerate(zip(banks, moe, strict=True)):
        for index in range(spec.num_experts):
            bank[index * spec.expert.record_bytes :][: spec.expert.record_bytes] = (
                10 * layer + index
            )
    arena = HostArena(moe, pinned=False, banks=banks)
    assert arena.nbytes == sum(bank.numel() for bank in banks)
    for layer, spec in enumerate(moe):
        for index in range(spec.num_experts):
            record = arena.record(layer, index)
            assert record.numel() == spec.expert.record_bytes
            assert set(record.tolist()) == {10 * layer + index}
            assert arena.address(layer, index) == record.data_ptr()
            assert arena.address(layer, index) % ALIGN_BYTES == 0


def test_every_bank_is_registered_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at the device's own address."""
    driver = FakeDriver(monkeypatch, offset=1 << 40)
    moe = layers(5, 3)
    banks = [make_bank(spec.num_experts, spec.expert.record_bytes) for spec in moe]
    arena = HostArena(moe, pinned=True, banks=banks)
    assert driver.registered == [(bank.data_ptr(), bank.numel()) for bank in banks]
    assert arena.address(1, 2) == arena.record(1, 2).data_ptr() + (1 << 40)
    arena.close()
    assert driver.unregistered == [bank.data_ptr() for bank in banks]


@pytest.mark.parametrize("num_bytes", [129 * MIB, 33 * MIB + 4096])
def test_memory_is_what_was_asked_for(num_bytes: int) -> None:
    """HR-01: at most 1.02 times the experts' bytes, measured; rounding to a power of two is not."""
    spec = expert(64, 32)
    moe = layers(num_bytes // spec.record_bytes, experts=[spec])
    before = anonymous_bytes()
    arena = HostArena(moe, pinned=False)
    arena.bytes_.fill_(1)
    asked = moe[0].num_experts * spec.record_bytes
    grown = anonymous_bytes() - before
    assert 0.98 * asked < grown < 1.02 * asked
    assert 1 << (asked - 1).bit_length() > 1.02 * asked, "the control: what torch would pin"
    arena.close()
    assert anonymous_bytes() - before < 0.02 * asked


def test_closing_twice_and_while_a_view_lives() -> None:
    moe = layers(4096, experts=[expert(64, 32)])
    before = anonymous_bytes()
    arena = HostArena(moe, pinned=False)
    arena.bytes_.fill_(7)
    view = arena.record(0, 1)
    arena.close()
    arena.close()
    assert bool((view == 7).all()), "a view keeps the memory that it shows"
    del view
    assert anonymous_bytes() - before < MIB


def test_a_forked_child_does_not_get_it() -> None:
    arena = HostArena(layers(4096, experts=[expert(64, 32)]), pinned=False)
    assert "dc" in flags_at(arena.address(0, 0))


def test_memory_that_cannot_be_had_is_said_in_bytes() -> None:
    moe = layers(2**40, experts=[expert(64, 32)])
    with pytest.raises(CapacityError, match=r"host arena needs .* TiB") as caught:
        HostArena(moe, pinned=False)
    assert "hotset plan" in (caught.value.hint or "")


class FakeDriver:
    """Registers host memory on paper; refuses where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, code: int = 0, offset: int = 0) -> None:
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self._code = code
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        runtime = SimpleNamespace(
            cudaHostRegister=self._register, cudaHostUnregister=self.unregistered.append
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(arena_module, "_device_pointer", lambda address: address + offset)

    def _register(self, address: int, size: int, flags: int) -> int:
        self.registered.append((address, size))
        return self._code


def test_exactly_the_mapping_is_registered_and_unregistered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver(monkeypatch)
    arena = HostArena(layers(5), pinned=True)
    assert arena.pinned
    assert driver.registered == [(arena.record(0, 0).data_ptr(), arena.nbytes)]
    base = driver.registered[0][0]
    arena.close()
    arena.close()
    assert driver.unregistered == [base]
    assert not arena.pinned


def test_an_arena_that_is_forgotten_is_unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    arena = HostArena(layers(5), pinned=True)
    base = arena.record(0, 0).data_ptr()
    del arena
    gc.collect()
    assert driver.unregistered == [base]


def test_the_devices_own_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch, offset=1 << 40)
    arena = HostArena(layers(5), pinned=True)
    assert arena.address(0, 3) == arena.record(0, 3).data_ptr() + (1 << 40)


def test_memory_that_cannot_be_locked_is_refused_with_limit_and_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HR-03, HR-07: no pageable copy that is ten times slower in silence."""
    driver = FakeDriver(monkeypatch, code=2)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 * 1024, 64 * 1024))
    with pytest.raises(HardwareError) as caught:
        HostArena(layers(4096, experts=[expert(64, 32)]), pinned=True)
    assert "48.00 MiB" in caught.value.message
    assert "memlock limit is 64.00 KiB" in caught.value.message
    for remedy in ("ulimit -l", "--ulimit memlock=-1", "WSL2"):
        assert remedy in (caught.value.hint or "")
    assert driver.unregistered == [], "nothing was registered"


def test_memory_that_the_device_cannot_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """HR-10: zero-copy is not optional; what was registered is unregistered."""
    driver = FakeDriver(monkeypatch)

    def unreadable(_: int) -> int:
        raise HardwareError("the device cannot read page-locked host memory (driver error 801)")

    monkeypatch.setattr(arena_module, "_device_pointer", unreadable)
    with pytest.raises(HardwareError, match="cannot read"):
        HostArena(layers(5), pinned=True)
    assert driver.unregistered == [driver.registered[0][0]]


def anonymous_bytes() -> int:
    gc.collect()
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    match: Any = re.search(r"^RssAnon:\s+(\d+) kB$", text, re.MULTILINE)
    return int(match.group(1)) * 1024


def flags_at(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds.group(1), 16) <= address < int(bounds.group(2), 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("the address is not mapped")
