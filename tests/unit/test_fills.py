"""Fills through whole layers: slots, table, mirror and outputs after any history of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from records import CPU, fill, layers, pools_of, resident

from hotset.core.placement import Placement
from hotset.core.policy import HalfLife, Lru, NoPolicy, Policy, Wishes
from hotset.core.slot_pools import IntArray
from hotset.experts.slots import POISON
from hotset.experts.store import ExpertStore
from hotset.kernels.dispatch import Kernels, ReferenceKernels
from hotset.kernels.match_reference import LayerMatch
from hotset.runtime.fills import FillPlanner
from hotset.runtime.moe import MATCH_TOKENS, MoERunner
from hotset.runtime.routing import RoutingLog
from hotset.runtime.steps import Steps

NUM_EXPERTS, TOP_K = (8, 6), 3
COUNTS = list(NUM_EXPERTS)


class Poisoning(ReferenceKernels):
    """Ruins every slot that is about to be filled before anything is read.

    A slot that is read and written in one step, or read when it should not be, then shows.
    """

    def expert_outputs(self, *args: Any, fill_E: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if fill_E is not None and self.store is not None:
            for slot in range(self.store.slots.num_slots):
                if self.store.slots.address(slot) in fill_E.tolist():
                    self.store.slots.view(slot).fill_(POISON)
        return super().expert_outputs(*args, fill_E=fill_E, **kwargs)

    store: ExpertStore | None = None


class Engine:
    """Two MoE layers, their store and a planner: what an engine has of a step."""

    def __init__(
        self,
        policy: Policy | None,
        *,
        num_slots: int = 5,
        owned: dict[int, list[int]] | None = None,
        num_spare: int = 0,
        kernels: Kernels | None = None,
    ) -> None:
        moe = layers(*NUM_EXPERTS)
        pools = pools_of(moe, num_slots)
        self.store = ExpertStore(
            moe, pools, device=CPU, staging_records=0, poison=True, num_spare=num_spare
        )
        fill(self.store)
        chosen = resident(self.store, {0: [0, 1, 2], 1: [0, 1]} if owned is None else owned)
        mask = chosen.resident[:, : max(NUM_EXPERTS)]
        self.store.place(Placement.from_residents(pools, mask, num_spare=num_spare))
        self.log = RoutingLog(self.store.layers)
        self.planner = FillPlanner(policy, self.store) if policy else None
        self.kernels = kernels or Poisoning()
        if isinstance(self.kernels, Poisoning):
            self.kernels.store = self.store
        self.runners = [self._runner(layer) for layer in range(len(moe))]
        self.host = [self.store.table.host_address[layer, :n] for layer, n in enumerate(COUNTS)]

    def _runner(self, layer: int) -> MoERunner:
        module: Any = SimpleNamespace(has_post_expert_norm=False)
        return MoERunner(
            layer,
            module,
            store=self.store,
            kernels=self.kernels,
            log=self.log,
            fills=self.planner.layers[layer] if self.planner else None,
        )

    def run(self, ids: list[torch.Tensor], seed: int = 0) -> None:
        """One forward; every layer's output equals what host memory alone gives, bit for bit."""
        source = torch.Generator().manual_seed(seed)
        for layer, ids_TK in enumerate(ids):
            x_TH = torch.randn(len(ids_TK), 24, generator=source).bfloat16()
            weights_TK = torch.rand(ids_TK.shape, generator=source)
            got = self.runners[layer](x_TH, ids_TK, weights_TK)
            plain = ReferenceKernels()
            spec = self.store.layers[layer].expert
            y_TKH = plain.expert_outputs(x_TH, ids_TK, self.host[layer], spec)
            assert torch.equal(got, plain.combine(y_TKH, weights_TK, x_TH.dtype))
            assert got.isfinite().all(), "a poisoned slot was read"

    def step(self, ids: list[torch.Tensor], seed: int = 0) -> int:
        """A whole step; returns the number of fills."""
        assert self.planner is not None
        self.planner.begin_step()
        self.run(ids, seed)
        matches = self.planner.end_step(self.log.take())
        self.log.count(matches)
        self.check()
        return len(matches)

    def check(self) -> None:
        self.store.placement.check()
        assert self.store.audit() == []


def random_ids(rng: np.random.Generator, num_tokens: int) -> list[torch.Tensor]:
    """Skewed ids with repeats in a row and padding on both sides."""
    found = []
    for num_experts in NUM_EXPERTS:
        ids = rng.integers(0, num_experts, (num_tokens, TOP_K)) // rng.integers(1, 3)
        ids[rng.random(ids.shape) < 0.1] = rng.choice([-1, num_experts])
        found.append(torch.from_numpy(ids))
    return found


class Scripted(Policy):
    """Wishes for what it is told, sensible or not."""

    name = "scripted"

    def __init__(self, victims: list[list[int]], admit: int = 99) -> None:
        super().__init__(COUNTS, num_victims=len(victims[0]))
        self.script = victims
        self.admit = admit

    def observe(self, ids_LN: IntArray) -> None: ...

    def read(self, layer: int, ids_TK: IntArray) -> None: ...

    def scores(self, layer: int) -> np.ndarray:
        return np.zeros(COUNTS[layer])

    def wishes(self, placement: Placement, *, out: Wishes | None = None) -> Wishes:
        wishes = self._buffers(out)
        wishes.victims_LV[:] = self.script
        wishes.admit_LE[:] = self.admit
        return wishes


POLICIES = pytest.mark.parametrize(
    "make", [lambda: HalfLife(COUNTS, half_life=3.0), lambda: Lru(COUNTS)], ids=["half-life", "lru"]
)


@POLICIES
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_any_history_of_steps(make: Any, num_tokens: int) -> None:
    """CC-18: 60 steps, audited byte for byte and compared bit for bit after each."""
    engine, rng = Engine(make()), np.random.default_rng(num_tokens)
    fills = sum(engine.step(random_ids(rng, num_tokens), seed) for seed in range(60))
    assert fills > 20, "control: slots changed hands"
    assert 0 < engine.log.total.hits < engine.log.total.used


@POLICIES
def test_the_host_may_lag_behind_the_device(make: Any) -> None:
    """Every step is queued before the host has learnt what the one before it routed."""
    engine, rng = Engine(make()), np.random.default_rng(0)
    planner = engine.planner
    assert planner is not None
    waiting, fills = [], 0
    for seed in range(40):
        planner.begin_step()
        engine.run(random_ids(rng, 2), seed)
        waiting.append(engine.log.take())
        lag = (0, 1, 2)[seed // 14]
        while len(waiting) > lag:
            fills += len(planner.end_step(waiting.pop(0)))
    assert engine.store.steps_in_flight == 2
    with pytest.raises(AssertionError):
        engine.store.place(engine.store.placement)
    for ids_LN in waiting:
        planner.end_step(ids_LN)
    engine.check()
    assert fills > 10


@pytest.mark.parametrize(
    ("num_slots", "owned"),
    [(1, {0: [0]}), (1, {}), (0, {}), (14, {0: list(range(8)), 1: list(range(6))})],
    ids=["one slot", "one free slot", "no slot", "all"],
)
def test_ends_of_the_range(num_slots: int, owned: dict[int, list[int]]) -> None:
    """Fewer slots than a layer routes, none at all, and one for everybody."""
    engine = Engine(Lru(COUNTS), num_slots=num_slots, owned=owned)
    rng = np.random.default_rng(0)
    for seed in range(10):
        engine.step(random_ids(rng, 2), seed)


def test_all_missing_fill_all_victims() -> None:
    engine = Engine(Lru(COUNTS))
    ids = [torch.tensor([[4, 5, 6], [7, 7, 4]]), torch.tensor([[3, 4, 5], [5, 4, 3]])]
    assert engine.step(ids) == 5
    assert [list(engine.store.placement.residents(layer)) for layer in (0, 1)] == [
        [4, 5, 6],
        [3, 4],
    ]


def test_routed_victims_stay() -> None:
    """Their slots are read in the step in which they are wished away."""
    engine = Engine(Scripted([[0, 1, 2], [1, 0, -1]]))
    ids = [torch.tensor([[0, 1, 5]]), torch.tensor([[0, 1, 5]])]
    assert engine.step(ids) == 1
    assert list(engine.store.placement.residents(0)) == [0, 1, 5]
    assert list(engine.store.placement.residents(1)) == [0, 1]


class Reckless(Poisoning):
    """A match that does not ask whether a victim is routed."""

    def match(self, ids_TK: torch.Tensor, layer: LayerMatch, **kwargs: Any) -> None:
        missing = [e for e in ids_TK.flatten().tolist() if e not in layer.victims_V.tolist()]
        super().match(torch.tensor(missing), layer)


def test_control_a_slot_read_and_written_in_one_step_shows() -> None:
    engine = Engine(Scripted([[0, -1], [-1, -1]]), kernels=Reckless())
    assert engine.planner is not None
    engine.planner.begin_step()
    with pytest.raises(AssertionError):
        engine.run([torch.tensor([[0, 5, 6]]), torch.tensor([[0, 1, 2]])])


def test_lent_slots_are_filled_first() -> None:
    engine = Engine(Lru(COUNTS), num_slots=7, num_spare=2)
    columns = [engine.store.lend(1) for _ in range(2)]
    engine.check()
    ids = [torch.tensor([[0, 1, 2]]), torch.tensor([[3, 4, 5]])]
    assert engine.step(ids) == 2, "under wishes made before the slots were lent"
    assert engine.step(ids) == 1, "the third expert takes an empty slot"
    rng = np.random.default_rng(0)
    fills = sum(engine.step(random_ids(rng, 1), seed) for seed in range(10))
    assert fills > 3
    assert not engine.store.placement.resident[1, columns].any()
    assert len(engine.store.placement.residents(1)) == 4


def test_a_step_that_broke_off_is_mended() -> None:
    engine = Engine(Lru(COUNTS))
    planner = engine.planner
    assert planner is not None
    planner.begin_step()
    missing = torch.tensor([[5, 6, 7]])
    engine.kernels.match(missing, planner.layers[0])
    x_TH, row = torch.randn(1, 24).bfloat16(), engine.store.table.row(0)
    spec = engine.store.layers[0].expert
    engine.kernels.expert_outputs(x_TH, missing, row, spec, fill_E=planner.layers[0].fill_E)
    assert len(engine.store.audit()) == 3, "control: slots are written, the table is not"
    engine.log.drop()
    planner.abandon()
    engine.check()
    rng = np.random.default_rng(0)
    assert sum(engine.step(random_ids(rng, 2), seed) for seed in range(10)) > 3


def test_control_a_forgotten_step_shows() -> None:
    engine = Engine(Lru(COUNTS))
    assert engine.planner is not None
    engine.planner.begin_step()
    engine.run([torch.tensor([[5, 6, 7]]), torch.tensor([[3, 4, 5]])])
    assert engine.store.audit() != []


class Counting(ReferenceKernels):
    """Counts which ops ran, and whether `combine` was to retarget."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def match(self, *args: Any, **kwargs: Any) -> None:
        self.calls["match"] += 1
        super().match(*args, **kwargs)

    def combine(self, *args: Any, matched: LayerMatch | None = None, **kwargs: Any) -> Any:
        self.calls["combine" if matched is None else "retarget"] += 1
        return super().combine(*args, matched=matched, **kwargs)


def many_ids(num_tokens: int) -> list[torch.Tensor]:
    return [torch.zeros(num_tokens, TOP_K, dtype=torch.int64) for _ in NUM_EXPERTS]


def test_only_steps_of_decode_size_match() -> None:
    engine = Engine(Lru(COUNTS), kernels=Counting())
    engine.run(many_ids(MATCH_TOKENS))
    assert engine.kernels.calls == {"match": 2, "retarget": 2}
    engine.run(many_ids(MATCH_TOKENS + 1))
    assert engine.kernels.calls == {"match": 2, "retarget": 2}, "summed range by range"


def test_without_a_planner_nothing_is_launched_for_it() -> None:
    engine = Engine(None, kernels=Counting())
    engine.run(many_ids(1))
    assert engine.kernels.calls == {"combine": 2}
    with pytest.raises(AssertionError, match="never fills"):
        FillPlanner(NoPolicy(COUNTS), engine.store)


def test_counts_equal_those_of_an_unmatched_step() -> None:
    ids = random_ids(np.random.default_rng(3), 4)
    engine = Engine(Lru(COUNTS))
    engine.run(ids)
    Steps(engine.store, engine.log, None).account(engine.log.take(), filled=False)
    plain = engine.log.total.copy()
    engine = Engine(Lru(COUNTS))
    engine.step(ids)
    assert engine.log.total.fills > 0 == plain.fills
    assert replace(engine.log.total, fills=0) == plain
    assert plain.link_bytes > 0


def test_a_prompt_that_was_read_changes_wishes() -> None:
    policy = HalfLife(COUNTS)
    engine = Engine(policy)
    assert engine.planner is not None
    before = engine.store.placement.slot_of.copy()
    for layer in range(2):
        policy.read(layer, np.array([[4, 5]] * 30))
    engine.planner.renew()
    assert np.array_equal(engine.store.placement.slot_of, before)
    engine.planner.begin_step()
    assert engine.planner.layers[0].admit_E.tolist()[4:6] == [3, 3]
    victims = engine.planner.layers[0].victims_V
    assert set(victims.tolist()) == {0, 1, 2, -1}


@pytest.fixture
def buffers() -> Iterator[Any]:
    from hotset.experts.wishes import WishBuffers

    yield WishBuffers(2, 3, 4, device=CPU)


def test_wishes_come_into_force_whole_and_in_order(buffers: Any) -> None:
    where = buffers.victims_LV.data_ptr(), buffers.admit_LE.data_ptr()
    assert buffers.send() == 0, "nothing staged, nothing sent"
    assert (buffers.victims_LV == -1).all() and not buffers.admit_LE.any()
    for number in (1, 2, 3):
        staged = buffers.stage()
        staged.victims_LV[:], staged.admit_LE[:] = number, -number
        assert not (buffers.victims_LV == number).any()
        assert buffers.send() == number
        assert (buffers.victims_LV == number).all() and (buffers.admit_LE == -number).all()
        assert (buffers.sent(number).victims_LV == number).all()
        before = buffers.sent(number - 1)
        assert number == 1 or (before.admit_LE == 1 - number).all()
    assert where == (buffers.victims_LV.data_ptr(), buffers.admit_LE.data_ptr())
    assert buffers.nbytes == 4 * (6 + 8)


def test_wishes_that_are_gone_are_not_replayed(buffers: Any) -> None:
    for _ in range(2):
        buffers.stage()
        buffers.send()
    with pytest.raises(AssertionError, match="wishes 0 are gone"):
        buffers.sent(0)
    buffers.stage()
    with pytest.raises(AssertionError, match="wishes 1 are gone"):
        buffers.sent(1)
