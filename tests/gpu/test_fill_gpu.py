"""Fills on a GPU at real sizes: mirror, slots and outputs after random histories, also captured."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hotset.core.geometry import ExpertSpec, Gate, GateForm, MoELayer
from hotset.core.placement import Placement
from hotset.core.policy import HalfLife, Lru, Policy
from hotset.core.slot_pools import SlotPools
from hotset.experts.store import ExpertStore
from hotset.kernels.dispatch import ReferenceKernels, TritonKernels
from hotset.kernels.match_reference import LayerMatch
from hotset.runtime.fills import FillPlanner
from hotset.runtime.moe import MoERunner
from hotset.runtime.routing import RoutingLog

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Experts of Qwen3-30B-A3B, two layers of them: 2.4 GB of host memory, 0.6 GB of slots.
NUM_LAYERS, NUM_EXPERTS, TOP_K, HIDDEN, SLOTS_PER_LAYER = 2, 128, 8, 2048, 32
CUDA, TRITON = torch.device("cuda"), TritonKernels()
COUNTS = [NUM_EXPERTS] * NUM_LAYERS


@pytest.fixture(scope="module")
def store() -> Iterator[ExpertStore]:
    spec = ExpertSpec.build(
        hidden=HIDDEN,
        intermediate=768,
        gate=Gate(GateForm.PLAIN),
        has_bias=False,
        dtype="bfloat16",
    )
    layers = [MoELayer(f"layers.{n}", NUM_EXPERTS, TOP_K, spec) for n in range(NUM_LAYERS)]
    size = spec.record_bytes
    pools = SlotPools.build(
        num_experts=COUNTS,
        record_bytes=[size] * NUM_LAYERS,
        num_slots={size: SLOTS_PER_LAYER * NUM_LAYERS},
    )
    with ExpertStore(layers, pools, device=CUDA, staging_records=0, poison=True) as store:
        source = torch.Generator(CUDA).manual_seed(0)
        for layer in range(NUM_LAYERS):
            for expert in range(NUM_EXPERTS):
                record = store.arena.record(layer, expert).view(torch.bfloat16)
                noise = torch.randn(record.numel(), generator=source, device=CUDA) * HIDDEN**-0.5
                record.copy_(noise)
        yield store


class Engine:
    """The MoE layers of a step, with fixed inputs as a captured step has them."""

    def __init__(self, store: ExpertStore, policy: Policy, num_tokens: int) -> None:
        store.restore()  # whatever a test before left behind
        first = np.arange(NUM_EXPERTS) < SLOTS_PER_LAYER
        resident_LE = np.tile(first, (NUM_LAYERS, 1))
        store.place(Placement.from_residents(store.placement.pools, resident_LE))
        self.store, self.log = store, RoutingLog(store.layers)
        self.planner = FillPlanner(policy, store)
        module: Any = SimpleNamespace(has_post_expert_norm=False)
        self.runners = [
            MoERunner(
                layer,
                module,
                store=store,
                kernels=TRITON,
                log=self.log,
                fills=self.planner.layers[layer],
            )
            for layer in range(NUM_LAYERS)
        ]
        self.x_LTH = torch.zeros(NUM_LAYERS, num_tokens, HIDDEN, dtype=torch.bfloat16, device=CUDA)
        self.ids_LTK = torch.zeros(NUM_LAYERS, num_tokens, TOP_K, dtype=torch.int64, device=CUDA)
        self.weights_TK = torch.rand(num_tokens, TOP_K, device=CUDA)

    def route(self, rng: np.random.Generator) -> np.ndarray:
        """New inputs: skewed ids, one row of padding in a batch; returns [L, N]."""
        shape = tuple(self.ids_LTK.shape)
        ids = np.minimum(rng.geometric(0.04, shape), NUM_EXPERTS) - 1
        ids = (ids + rng.integers(0, 40)) % NUM_EXPERTS
        if shape[1] > 1:
            ids[:, -1] = -1
        self.ids_LTK.copy_(torch.from_numpy(ids))
        self.x_LTH.normal_()
        return ids.reshape(NUM_LAYERS, -1)

    def forward(self) -> list[torch.Tensor]:
        pairs = zip(self.runners, self.x_LTH, self.ids_LTK, strict=True)
        return [runner(x_TH, ids_TK, self.weights_TK) for runner, x_TH, ids_TK in pairs]

    def plain(self) -> list[torch.Tensor]:
        """The same from host memory alone, by the same program: one that could fill and is given
        where to write."""
        outputs, no_fill_E = [], torch.zeros(NUM_EXPERTS, dtype=torch.int64, device="cuda")
        for layer, spec in enumerate(self.store.layers):
            x_TH, ids_TK = self.x_LTH[layer], self.ids_LTK[layer]
            host_E = self.store.table.host_address[layer, :NUM_EXPERTS]
            out = torch.empty(*ids_TK.shape, HIDDEN, device="cuda")
            y_TKH = TRITON.expert_outputs(
                x_TH, ids_TK, host_E, spec.expert, fill_E=no_fill_E, out=out
            )
            outputs.append(TRITON.combine(y_TKH, self.weights_TK, torch.bfloat16))
        return outputs

    def check(self, outputs: list[torch.Tensor]) -> None:
        assert all(map(torch.equal, outputs, self.plain()))
        assert all(out.isfinite().all() for out in outputs), "a poisoned slot was read"
        self.check_table()

    def check_table(self) -> None:
        """The device's addresses are those of the mirror."""
        slots = self.store.placement.slot_of
        slot_LE = self.store.slots.addresses(np.maximum(slots, 0))
        want_LE = np.where(slots >= 0, slot_LE, self.store.table.host_address.cpu().numpy())
        assert np.array_equal(self.store.table.address.cpu().numpy(), want_LE)


POLICIES = pytest.mark.parametrize(
    "make", [lambda: HalfLife(COUNTS), lambda: Lru(COUNTS)], ids=["half-life", "lru"]
)


@POLICIES
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_any_history_of_steps(store: ExpertStore, make: Any, num_tokens: int) -> None:
    engine, rng, fills = Engine(store, make(), num_tokens), np.random.default_rng(num_tokens), 0
    for _ in range(12):
        ids_LN = engine.route(rng)
        engine.planner.begin_step()
        outputs = engine.forward()
        fills += len(engine.planner.end_step(ids_LN))
        engine.log.drop()
        engine.check(outputs)
    assert fills > 20, "control: slots changed hands"
    assert store.audit() == []


def test_a_layer_never_waits(store: ExpertStore) -> None:
    engine, rng = Engine(store, Lru(COUNTS), 4), np.random.default_rng(0)
    for mode in ("default", "error"):  # the first compiles
        ids_LN = engine.route(rng)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            engine.planner.begin_step()
            engine.forward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine.planner.end_step(ids_LN)
    engine.check_table()


@POLICIES
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_captured_step_sees_what_changed(store: ExpertStore, make: Any, num_tokens: int) -> None:
    """CC-07: wishes, addresses and owners change between replays of one graph; two in flight."""
    engine, rng, fills = Engine(store, make(), num_tokens), np.random.default_rng(1), 0
    planner = engine.planner
    planner.begin_step()
    ids_LN = engine.route(rng)
    engine.forward()  # compiles
    planner.end_step(ids_LN)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = engine.forward()
    waiting = []
    for _ in range(20):
        waiting.append(engine.route(rng))
        planner.begin_step()
        graph.replay()
        outputs = [out.clone() for out in captured]
        assert all(map(torch.equal, outputs, engine.plain()))
        if len(waiting) == 2:
            fills += len(planner.end_step(waiting.pop(0)))
    planner.end_step(waiting.pop())
    engine.check_table()
    assert fills > 20

    # All experts leave their slots and others take them, by the host's own hand.
    others = np.tile(np.arange(NUM_EXPERTS) >= NUM_EXPERTS - SLOTS_PER_LAYER, (NUM_LAYERS, 1))
    store.place(Placement.from_residents(store.placement.pools, others))
    engine.ids_LTK.copy_(torch.arange(NUM_EXPERTS - TOP_K, NUM_EXPERTS))
    planner.begin_step()
    graph.replay()
    matches = planner.end_step(engine.ids_LTK.reshape(NUM_LAYERS, -1).cpu().numpy())
    assert matches.num_hits == matches.num_routed == NUM_LAYERS * TOP_K
    engine.check([out.clone() for out in captured])
    assert store.audit() == []


def test_a_step_that_broke_off_is_mended(store: ExpertStore) -> None:
    engine = Engine(store, Lru(COUNTS), 1)
    engine.planner.begin_step()
    missing = torch.arange(NUM_EXPERTS - TOP_K, NUM_EXPERTS, device=CUDA)[None]
    layer, spec = engine.planner.layers[0], store.layers[0].expert
    TRITON.match(missing, layer)
    row = store.table.row(0)
    TRITON.expert_outputs(engine.x_LTH[0], missing, row, spec, fill_E=layer.fill_E)
    assert len(store.audit()) == TOP_K, "control: slots are written, the table is not"
    engine.planner.abandon()
    assert store.audit() == []


@pytest.mark.parametrize(("num_experts", "num_victims"), [(60, 8), (512, 8), (1024, 16), (1023, 3)])
@pytest.mark.parametrize("num_tokens", [1, 2, 64, 300])
def test_match_equals_the_reference(num_experts: int, num_victims: int, num_tokens: int) -> None:
    for seed in range(4):
        source = torch.Generator().manual_seed(seed)

        def chance(count: int, share: float, source: torch.Generator = source) -> torch.Tensor:
            return torch.rand(count, generator=source) < share

        width = num_experts + 2
        host = torch.arange(1, width + 1) * 4096
        host[num_experts:] = 0
        host[:num_experts][chance(num_experts, 0.05)] = 0
        address = torch.where(chance(width, 0.4), 2**40 + torch.arange(width) * 4096, host)
        victims = torch.randperm(width, generator=source)[:num_victims].int()
        admit = torch.randint(num_victims + 2, (num_experts,), generator=source).int()
        layers = [
            LayerMatch(
                *(part.to(CUDA, copy=True) for part in (address, host, victims, admit)),
                fill_E=torch.full((num_experts,), 7, dtype=torch.int64, device=CUDA),
                evict_V=torch.full((num_victims,), 7, dtype=torch.int32, device=CUDA),
            )
            for _ in range(3)
        ]
        ids_TK = torch.randint(-1, width, (num_tokens, TOP_K), generator=source).to(CUDA)
        ReferenceKernels().match(ids_TK, layers[0])
        TRITON.match(ids_TK, layers[1])
        TRITON.match(ids_TK, layers[2], grouping=TRITON.group(ids_TK, num_experts))
        y_TKH, weights_TK = torch.zeros(1, 1, 8, device=CUDA), torch.ones(1, 1, device=CUDA)
        for kernels, layer in zip((ReferenceKernels(), TRITON, TRITON), layers, strict=True):
            kernels.combine(y_TKH, weights_TK, torch.float32, matched=layer)
            for name, value in vars(layer).items():
                assert torch.equal(value, getattr(layers[0], name)), name
