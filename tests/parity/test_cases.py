"""Cases of public bug reports on models of their shapes: few slots, extreme slots, long histories.

T1 is 3 layers of 16 experts, 4 of them used by a token.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from families import Family, difference, make_family, stock_logits, text
from hotset.core.placement import Placement
from hotset.runtime.engine import Engine
from hotset.runtime.verify import logit_bound
from tiny import tiny_config

T1_FIELDS = {"num_hidden_layers": 3, "num_local_experts": 16, "num_experts_per_tok": 4}
T1_EXPERTS = 3 * 16


def shaped(model_type: str, folder: Path, **fields: object) -> Family:
    config = tiny_config(model_type)
    values = {**config.to_dict(), **fields}
    for name in ("model_type", "layer_types", "mlp_layer_types"):
        values.pop(name, None)
    return make_family(model_type, folder, config=type(config)(**values))


@pytest.fixture(scope="module")
def t1(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return shaped("qwen3_moe", tmp_path_factory.mktemp("t1"), **T1_FIELDS)


def answer(engine: Engine, prompt: list[int], num_tokens: int) -> list[int]:
    steps = engine.generate_ids(prompt, max_tokens=num_tokens, stop_ids=frozenset())
    return [step.token_id for step in steps]


def test_both_ends_of_the_range_and_between(t1: Family) -> None:
    """CC-19: slots for none, one token's experts, half, and all: four equal results."""
    results, greedy = [], []
    for num_slots in (0, 4, T1_EXPERTS // 2, T1_EXPERTS):
        with t1.engine(num_slots=num_slots) as engine:
            results.append(engine.logits(text(40)))
            greedy.append(answer(engine, text(8), 24))
    assert all(torch.equal(result, results[0]) for result in results[1:])
    assert all(tokens == greedy[0] for tokens in greedy[1:])
    want = stock_logits(t1.stock(), text(40))
    assert difference(results[0], want) <= logit_bound(engine, want)


@pytest.mark.parametrize(("policy", "most_steps"), [("half-life", 500), ("lru", 150)])
def test_long_histories_leave_every_slot_right(t1: Family, policy: str, most_steps: int) -> None:
    """CC-01, CC-05, CC-18: each step needs more experts than there are slots; hundreds of steps,
    answers left early. Each answer is that of an engine without slots, and free slots hold NaN."""
    rng = random.Random(0)
    with t1.engine(share=0.0, policy="none") as plain, t1.engine(num_slots=4, policy=policy) as few:
        num_steps = filled = 0
        while num_steps < most_steps:
            prompt, num_tokens = text(rng.randrange(1, 30), seed=num_steps), rng.randrange(1, 30)
            want = answer(plain, prompt, num_tokens)
            before = few.store.placement.slot_of.copy()
            tokens = few.generate_ids(prompt, max_tokens=num_tokens, stop_ids=frozenset())
            left_after = rng.choice([1, 5, num_tokens])
            for count, step in enumerate(tokens, start=1):
                assert step.token_id == want[count - 1]
                if count == left_after:
                    break
            del tokens
            num_steps += count
            filled += not np.array_equal(before, few.store.placement.slot_of)
            assert few.store.audit() == []
        assert filled > 10, "slots did change hands"
        (layer, expert), slot = few.store.placement.owner(0), 0
        few.store.slots.view(slot)[77] ^= 1
        assert few.store.audit() == [f"slot {slot} differs from layer {layer} expert {expert}"]


def test_placements_that_hold_what_a_step_does_not_need(t1: Family) -> None:
    """CC-02: two slots, all of the needed experts missing or half of them; prompts of 1 to 32."""
    with (
        t1.engine(share=0.0, policy="none") as plain,
        t1.engine(num_slots=2, policy="none") as few,
    ):
        for num_tokens in (1, 2, 8, 32):
            ids = text(num_tokens, seed=num_tokens)
            want = plain.logits(ids)
            for first in range(0, 16, 3):
                placement = Placement(few.pools)
                placement.assign(first % 3, first)
                placement.assign((first + 1) % 3, (first + 7) % 16)
                few.place(placement)
                assert torch.equal(few.logits(ids), want)


def test_one_expert_is_a_dense_layer(tmp_path: Path) -> None:
    """LF-06: E = 1, K = 1."""
    family = shaped("mixtral", tmp_path, num_local_experts=1, num_experts_per_tok=1)
    want = stock_logits(family.stock(), text(20))
    with family.engine(share=1.0) as engine:
        assert difference(engine.logits(text(20)), want) <= logit_bound(engine, want)


def test_dense_first_layers_and_shared_experts_stay_resident(tmp_path: Path) -> None:
    """HR-04, MB-13, MB-14: T4, layer 0 dense, shared experts: only routed experts are records."""
    family = make_family("deepseek_v3", tmp_path)
    with family.engine(share=0.5) as engine:
        assert [layer.name.split(".")[2] for layer in engine.geometry.layers] == ["1", "2", "3"]
        names = engine.model.state_dict().keys()
        assert any("layers.0.mlp.gate_proj" in name for name in names)
        for layer in (1, 2, 3):
            assert f"model.layers.{layer}.mlp.shared_experts.down_proj.weight" in names
            assert f"model.layers.{layer}.mlp.gate.e_score_correction_bias" in names
        assert not any(".experts.gate_up_proj" in name for name in names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on the GPU here")
def test_the_gpus_kernels_in_the_interpreter(t1: Family) -> None:
    """The same source that runs on a GPU, end to end: near stock, and in any placement the same
    bits; one token and several."""
    want = stock_logits(t1.stock(), text(3))
    with t1.engine(num_slots=24, kernels="triton", policy="none") as engine:
        for num_tokens in (1, 3):
            got = engine.logits(text(3)[:num_tokens])
            assert difference(got, want[:num_tokens]) <= logit_bound(engine, want)
            engine.place(Placement(engine.pools))
            assert torch.equal(engine.logits(text(3)[:num_tokens]), got)
