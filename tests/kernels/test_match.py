"""The match rule on the device against the reference, and both against the host's mirror.

Wishes are random: stale, contradictory, pointing at experts that are gone, routed or pinned.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.core.placement import Placement
from hotset.core.slot_pools import SlotPools
from hotset.kernels.dispatch import Kernels, ReferenceKernels, TritonKernels
from hotset.kernels.match_reference import LayerMatch, retarget
from kernels.support import DEVICE

REFERENCE, TRITON = ReferenceKernels(), TritonKernels()
BOTH = pytest.mark.parametrize("kernels", [REFERENCE, TRITON], ids=lambda k: k.name)
HOST, SLOTS, STEP = 1 << 20, 1 << 40, 4096


@dataclass
class Layer:
    """One layer as the device sees it, and the mirror of it."""

    device: LayerMatch
    mirror: Placement

    @property
    def num_experts(self) -> int:
        return self.device.num_experts

    def addresses(self) -> list[int]:
        """What the device's table must hold, by the mirror."""
        slots = self.mirror.slot_of[0].tolist()
        home = self.device.host_address_W.tolist()
        pairs = zip(slots, home, strict=True)
        return [SLOTS + STEP * slot if slot >= 0 else address for slot, address in pairs]

    def wish(self, victims: np.ndarray, admit: np.ndarray) -> None:
        self.device.victims_V.copy_(torch.from_numpy(victims))
        self.device.admit_E.copy_(torch.from_numpy(admit))

    def replay(self, ids: torch.Tensor) -> list[tuple[int, int, int]]:
        """The mirror's matches for what is wished for now."""
        wishes = (self.device.victims_V.cpu().numpy(), self.device.admit_E.cpu().numpy())
        ids_1N = ids.cpu().numpy().reshape(1, -1)
        found = self.mirror.match_step(ids_1N, wishes[0][None], wishes[1][None])
        self.mirror.apply(found)
        self.mirror.check()
        columns = (found.expert, found.victim, found.slot)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def make_layer(
    resident: np.ndarray,
    *,
    pinned: np.ndarray | None = None,
    num_victims: int = 4,
    num_spare: int = 0,
    num_lent: int = 0,
) -> Layer:
    num_experts = len(resident)
    pools = SlotPools.uniform([num_experts], [int(resident.sum()) + num_lent])
    mirror = Placement.from_residents(pools, resident[None], num_spare=num_spare)
    home = torch.zeros(num_experts + num_spare, dtype=torch.int64)
    home[:num_experts] = HOST + STEP * torch.arange(num_experts)
    if pinned is not None:
        home[:num_experts][torch.from_numpy(pinned & resident)] = 0
        for expert in np.flatnonzero(pinned & resident):
            mirror.pin(0, int(expert))
    for _ in range(num_lent):
        mirror.lend(0)
    device = LayerMatch(
        address_W=torch.zeros_like(home),
        host_address_W=home,
        victims_V=torch.full((num_victims,), -1, dtype=torch.int32),
        admit_E=torch.zeros(num_experts, dtype=torch.int32),
        fill_E=torch.full((num_experts,), -7, dtype=torch.int64),  # must be overwritten
        evict_V=torch.full((num_victims,), 7, dtype=torch.int32),
    )
    layer = Layer(moved(device), mirror)
    layer.device.address_W.copy_(torch.tensor(layer.addresses()))
    return layer


def moved(layer: LayerMatch) -> LayerMatch:
    """A copy on the device under test."""
    return LayerMatch(*(getattr(layer, f.name).to(DEVICE, copy=True) for f in fields(layer)))


def victims_of(rng: np.random.Generator, num_columns: int, num_victims: int) -> np.ndarray:
    victims = np.full(num_victims, -1, dtype=np.int32)
    chosen = rng.permutation(num_columns)[:num_victims]
    victims[: len(chosen)] = chosen
    victims[rng.random(num_victims) < 0.2] = -1
    return victims


def check_step(kernels: Kernels, layer: Layer, ids_TK: torch.Tensor, *, grouped: bool) -> int:
    """One step on the device and on the mirror; returns the number of fills."""
    grouping = kernels.group(ids_TK, layer.num_experts) if grouped else None
    before = layer.addresses()
    kernels.match(ids_TK, layer.device, grouping=grouping)
    fill, evict = layer.device.fill_E.tolist(), layer.device.evict_V.tolist()
    wished = layer.device.victims_V.tolist()
    found = layer.replay(ids_TK)

    assert layer.device.address_W.tolist() == before, "match itself retargets nothing"
    want_fill, want_evict = [0] * layer.num_experts, [-1] * len(wished)
    for expert, victim, slot in found:
        want_fill[expert] = SLOTS + STEP * slot
        want_evict[wished.index(victim)] = victim
    assert fill == want_fill
    assert evict == want_evict

    retarget_on_device(kernels, layer.device)
    assert layer.device.address_W.tolist() == layer.addresses()
    routed = set(ids_TK.flatten().tolist())
    read = {before[expert] for expert in routed if 0 <= expert < layer.num_experts}
    assert read.isdisjoint(address for address in fill if address), "read and written in one step"
    return len(found)


def retarget_on_device(kernels: Kernels, layer: LayerMatch) -> None:
    """Through `combine`, as in a layer; its output must not suffer."""
    y_TKH = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weights_TK = torch.ones(2, 3, device=DEVICE)
    out = kernels.combine(y_TKH, weights_TK, torch.float32, matched=layer)
    assert torch.equal(out, kernels.combine(y_TKH, weights_TK, torch.float32))


@BOTH
@pytest.mark.parametrize("grouped", [False, True], ids=["ids", "grouped"])
def test_random_histories_equal_the_mirror(kernels: Kernels, grouped: bool) -> None:
    num_fills = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        num_experts, num_spare = int(rng.integers(3, 40)), int(rng.integers(0, 4))
        num_lent = int(rng.integers(0, num_spare + 1))
        num_victims = int(rng.integers(1, 12))
        layer = make_layer(
            rng.random(num_experts) < 0.4,
            pinned=rng.random(num_experts) < 0.1,
            num_victims=num_victims,
            num_spare=num_spare,
            num_lent=num_lent,
        )
        for _ in range(8):
            victims = victims_of(rng, num_experts + num_spare, num_victims)
            admit = rng.integers(0, num_victims + 2, num_experts).astype(np.int32)
            layer.wish(victims, admit)
            shape = (int(rng.integers(1, 5)), int(rng.integers(1, 6)))
            ids = rng.integers(-2, num_experts + num_spare + 2, shape)
            ids_TK = torch.from_numpy(ids.astype(rng.choice(["i8", "i4", "i2"]))).to(DEVICE)
            num_fills += check_step(kernels, layer, ids_TK, grouped=grouped)
    assert num_fills > 30, "control: something was matched"


@st.composite
def steps(draw: st.DrawFn) -> tuple[Layer, torch.Tensor]:
    num_experts, num_victims = draw(st.integers(1, 9)), draw(st.integers(1, 5))

    def numbers(low: int, high: int, count: int) -> np.ndarray:
        found = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
        return np.array(found, dtype=np.int32)

    resident = numbers(0, 1, num_experts).astype(bool)
    pinned = numbers(0, 1, num_experts).astype(bool)
    layer = make_layer(
        resident,
        pinned=pinned,
        num_victims=num_victims,
        num_spare=2,
        num_lent=draw(st.integers(0, 2)),
    )
    victims = np.full(num_victims, -1, dtype=np.int32)
    named = draw(st.permutations(range(num_experts + 2)))[:num_victims]
    victims[: len(named)] = named
    layer.wish(victims, numbers(0, num_victims + 1, num_experts))
    ids = numbers(-1, num_experts + 1, draw(st.integers(1, 6)))
    return layer, torch.from_numpy(ids)[:, None].to(DEVICE)


@settings(max_examples=60, deadline=None)
@given(steps(), st.booleans())
def test_any_step_equals_the_mirror(step: tuple[Layer, torch.Tensor], grouped: bool) -> None:
    check_step(TRITON, *step, grouped=grouped)


@BOTH
@pytest.mark.parametrize("num_experts", [1, 31, 128, 300])
def test_awkward_sizes(kernels: Kernels, num_experts: int) -> None:
    """More ids and victims than fit one tile, an expert alone, all experts missing."""
    rng = np.random.default_rng(num_experts)
    layer = make_layer(np.arange(num_experts) % 3 == 0, num_victims=40)
    victims = victims_of(rng, num_experts, 40)
    layer.wish(victims, np.full(num_experts, 40, dtype=np.int32))
    ids_TK = torch.from_numpy(rng.integers(0, num_experts, (25, 4))).to(DEVICE)
    check_step(kernels, layer, ids_TK, grouped=False)
    check_step(kernels, layer, ids_TK, grouped=True)


@BOTH
def test_no_routed_ids_no_fills(kernels: Kernels) -> None:
    layer = make_layer(np.array([True, False, False]))
    layer.wish(np.array([0, -1, -1, -1], dtype=np.int32), np.full(3, 4, dtype=np.int32))
    for ids_TK in (torch.full((2, 2), -1), torch.full((1, 2), 3), torch.empty((0, 2)).long()):
        assert check_step(kernels, layer, ids_TK.to(DEVICE), grouped=False) == 0


@BOTH
def test_who_is_never_touched(kernels: Kernels) -> None:
    """Routed victims, pinned ones, those gone already, and missing experts without a copy."""
    resident = np.array([True, True, True, False, False, False])
    layer = make_layer(resident, pinned=np.array([False, True, False, False, False, False]))
    layer.device.host_address_W[5] = layer.device.address_W[5] = 0  # neither slot nor copy
    layer.wish(np.array([0, 1, 4, 2], dtype=np.int32), np.full(6, 4, dtype=np.int32))
    kernels.match(torch.tensor([[0, 3, 5, 5]], device=DEVICE), layer.device)
    # 0 is routed, 1 has no host copy, 4 has no slot: 2 alone is free, and 3 alone may have it.
    assert layer.device.evict_V.tolist() == [-1, -1, -1, 2]
    slot = int(layer.device.address_W[2])
    assert layer.device.fill_E.tolist() == [0, 0, 0, slot, 0, 0]


def test_control_a_wrong_mirror_is_noticed() -> None:
    layer = make_layer(np.array([True, False, False]))
    layer.wish(np.array([0, -1, -1, -1], dtype=np.int32), np.full(3, 4, dtype=np.int32))
    layer.mirror.pin(0, 0)  # what the device does not know
    with pytest.raises(AssertionError):
        check_step(TRITON, layer, torch.tensor([[2]], device=DEVICE), grouped=False)


def test_retargeting_spends_a_spare_column() -> None:
    layer = make_layer(np.array([True, False]), num_victims=2, num_spare=1, num_lent=1)
    layer.wish(np.array([2, -1], dtype=np.int32), np.full(2, 1, dtype=np.int32))
    lent = int(layer.device.address_W[2])
    TRITON.match(torch.tensor([[1, 2]], device=DEVICE), layer.device)
    retarget(layer.device)
    assert layer.device.address_W.tolist()[1:] == [lent, 0]


def test_a_broken_contract_is_our_bug() -> None:
    layer = make_layer(np.array([True, False]))
    wrong = LayerMatch(**{**vars(layer.device), "admit_E": layer.device.admit_E.long()})
    for kernels in (REFERENCE, TRITON):
        with pytest.raises(AssertionError):
            kernels.match(torch.tensor([[0]], device=DEVICE), wrong)
