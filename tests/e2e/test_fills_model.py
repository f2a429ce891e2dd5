"""Whole models under policies and budgets: who owns a slot, and when it changes, alters no bit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from hotset.bench.random_weights import RandomWeights
from hotset.core.placement import Placement
from hotset.core.policy import make_policy
from hotset.core.slot_pools import SlotPools
from hotset.experts.store import ExpertStore
from hotset.kernels.dispatch import ReferenceKernels
from hotset.models.seam import bind_experts, experts_modules
from hotset.runtime.fills import FillPlanner
from hotset.runtime.moe import MoERunner
from hotset.runtime.routing import RoutingLog
from hotset.runtime.steps import Steps
from tiny import tiny_config

CPU = torch.device("cpu")
PROMPT, NUM_TOKENS = list(range(3, 20)), 64


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    num_fills: int = 0
    hit_rate: float = 0.0


@torch.inference_mode()
def answer(weights: RandomWeights, policy: str, slots_per_layer: int) -> Answer:
    """Greedy tokens of a model of which so many experts of each layer begin with a slot."""
    moe = weights.geometry.layers
    sizes = [layer.expert.record_bytes for layer in moe]
    num_slots = {size: sizes.count(size) * slots_per_layer for size in sizes}
    num_experts = [layer.num_experts for layer in moe]
    pools = SlotPools.build(num_experts=num_experts, record_bytes=sizes, num_slots=num_slots)
    with ExpertStore(moe, pools, device=CPU, staging_records=0, poison=True) as store:
        weights.fill_experts(store, lambda done, total: None)
        # As large as the library's own initialisation is small: experts must matter.
        store.arena.bytes_.view(torch.float32).mul_(8)
        first = np.arange(max(num_experts)) < slots_per_layer
        store.place(Placement.from_residents(pools, np.tile(first, (len(moe), 1))))
        chosen = make_policy(policy, num_experts=num_experts)
        planner = FillPlanner(chosen, store) if chosen.moves else None
        return _generate(weights, store, planner)


def _generate(weights: RandomWeights, store: ExpertStore, planner: FillPlanner | None) -> Answer:
    model, log, found = weights.load_resident(CPU), RoutingLog(store.layers), Answer()
    for layer, module in enumerate(experts_modules(model).values()):
        fills = planner.layers[layer] if planner else None
        runner = MoERunner(
            layer, module, store=store, kernels=ReferenceKernels(), log=log, fills=fills
        )
        bind_experts(module, runner)
    books, ids, cache = Steps(store, log, None), PROMPT, None
    for _ in range(NUM_TOKENS):
        if planner:
            planner.begin_step()
        out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        if planner:
            matches = planner.end_step(log.take())
            log.count(matches)
            found.num_fills += len(matches)
        else:
            books.account(log.take(), filled=False)
        cache, logits_V = out.past_key_values, out.logits[0, -1]
        found.logits.append(logits_V)
        found.tokens.append(int(logits_V.argmax()))
        ids = found.tokens[-1:]
    assert store.audit() == []
    found.hit_rate = log.total.hit_rate
    return found


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_the_same_tokens_and_logits_under_every_policy_and_budget(model_type: str) -> None:
    config = tiny_config(model_type)
    weights = RandomWeights(config, dtype="float32", seed=1)
    plain = answer(weights, "none", 0)
    assert len(set(plain.tokens)) > 3, "control: the model says something"
    assert plain.num_fills == 0
    for policy, slots in (("none", 3), ("half-life", 2), ("half-life", 6), ("lru", 1), ("lru", 4)):
        got = answer(weights, policy, slots)
        assert got.tokens == plain.tokens
        assert all(map(torch.equal, got.logits, plain.logits))
        assert (got.num_fills > 20) == (policy != "none"), got.num_fills
        assert got.hit_rate > 0
