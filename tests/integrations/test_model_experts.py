"""The experts of a model as the plugin keeps them, driven as vLLM drives them, without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotset.core.errors import CheckpointError, ConfigError
from hotset.core.fingerprint import ModelFingerprint
from hotset.core.geometry import ExpertSpec, Gate, GateForm, MoELayer
from hotset.core.profile import NUM_REUSE_BUCKETS, Profile
from hotset.integrations.vllm.config import PluginConfig
from hotset.integrations.vllm.model import ModelExperts
from hotset.integrations.vllm.replays import LayerReplays
from hotset.integrations.vllm.verify import verify_experts
from hotset.kernels import reference

NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 8, 2
SPEC = ExpertSpec.build(
    hidden=32, intermediate=16, gate=Gate(GateForm.PLAIN), has_bias=False, dtype="float32"
)


def make_model(*, num_slots: int = 6, damaged: bool = False, **options: Any) -> ModelExperts:
    """Layers added while another device is the default, as vLLM builds models; then loaded."""
    config = PluginConfig(vram_bytes=num_slots * SPEC.record_bytes, poison=True, **options)
    model = ModelExperts(config, torch.device("cpu"))
    with torch.device("meta"):
        for index in range(NUM_LAYERS):
            model.add(MoELayer(f"layers.{index}", NUM_EXPERTS, TOP_K, SPEC))
    source = torch.Generator().manual_seed(0)
    for bank in model.banks:
        weights = bank.view(torch.float32)
        weights.copy_(torch.randn(weights.shape, generator=source) * 0.2)
    if damaged:
        model.banks[1].view(torch.float32)[100] = torch.inf
    assert [model.loaded(index) for index in range(NUM_LAYERS)] == [False, True]
    return model


def step(model: ModelExperts, num_tokens: int, seed: int, layers: int = NUM_LAYERS) -> torch.Tensor:
    """One forward, of which `layers` layers run; compared with the specification bit for bit."""
    source = np.random.default_rng(seed)
    x_TH = torch.tensor(source.normal(size=(num_tokens, SPEC.hidden)), dtype=torch.float32)
    for index in range(layers):
        chosen = [source.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(num_tokens)]
        ids_TK = torch.tensor(np.array(chosen), dtype=torch.int32)
        weights_TK = torch.tensor(source.random((num_tokens, TOP_K)), dtype=torch.float32)
        addresses = [model.store.arena.address(index, expert) for expert in range(NUM_EXPERTS)]
        y_TKH = reference.expert_outputs(x_TH, ids_TK, torch.tensor(addresses), SPEC)
        want_TH = reference.combine(y_TKH, weights_TK, torch.float32)
        with torch.inference_mode():
            got_TH = model.run(index, x_TH, ids_TK, weights_TK)
        if num_tokens <= 64:  # beyond, the sum is in the order of the experts
            assert torch.equal(got_TH, want_TH)
        x_TH = want_TH
    return x_TH


def test_steps_are_counted_filled_and_right() -> None:
    model = make_model()
    for seed in range(12):
        step(model, 1 + seed % 3, seed)
    assert model.traffic.steps == 11, "the newest step is counted behind the next"
    model.end_step()
    assert model.traffic.steps == 12
    assert model.traffic.fills > 0 and 0 < model.traffic.hits < model.traffic.used
    assert verify_experts(model) == []


def test_long_steps_among_short_ones() -> None:
    model = make_model(staging="ring", num_slots=8)
    for seed, num_tokens in enumerate([100, 2, 70, 1, 1, 100]):
        step(model, num_tokens, seed)
    assert verify_experts(model) == []
    assert model.traffic.steps == 6


def test_the_host_takes_a_step_in_behind_the_next_one() -> None:
    """So that a device always has a step to run; a long step waits for those before it."""
    model = make_model()
    waited: list[int] = []
    send = model.steps.log.send

    def sent() -> Callable[[], np.ndarray]:
        number, wait = len(numbers), send()
        numbers.append(number)

        def known() -> np.ndarray:
            waited.append(number)
            return wait()

        return known

    numbers: list[int] = []
    model.steps.log.send = sent  # type: ignore[method-assign]
    for seed, num_tokens in enumerate([2, 2, 3]):
        step(model, num_tokens, seed)
        assert waited == list(range(seed)), "all but the newest"
    step(model, 65, 3)
    assert waited == [0, 1, 2, 3] and verify_experts(model) == []


def replayed(model: ModelExperts) -> list[int]:
    """Gives a model on a CPU what graphs are to one on a GPU; returns the captured batches."""
    captured: list[int] = []
    log = model.steps.log

    def capture(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        out_TH = torch.full((sizes[-1], SPEC.hidden), torch.nan)
        captured.append(sizes[-1])

        def replay() -> None:
            with log.aside():
                out_TH.copy_(call())

        return out_TH, replay

    model._replays = LayerReplays(log, capture)
    run, sizes = model.run, [0]

    def noted(index: int, x_TH: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x_TH))
        return run(index, x_TH, *rest, is_repeated=True).clone()

    model.run = noted  # type: ignore[method-assign,assignment]
    return captured


def test_layers_replayed_give_the_same_and_count_the_same() -> None:
    plain, model = make_model(), make_model()
    captured = replayed(model)
    for seed in range(14):
        num_tokens = (1, 1, 3, 1, 80, 1)[seed % 6]
        step(plain, num_tokens, seed)
        step(model, num_tokens, seed)
    assert captured == [1, 1], "one number of tokens came again often enough, in two layers"
    model.end_step()
    plain.end_step()
    assert model.traffic == plain.traffic and model.traffic.fills > 0
    assert np.array_equal(model.store.placement.slot_of, plain.store.placement.slot_of)
    assert verify_experts(model) == []


def test_a_step_that_breaks_off_leaves_slots_right() -> None:
    model = make_model()
    step(model, 2, 0)
    step(model, 2, 1, layers=1)
    step(model, 2, 2)
    assert verify_experts(model) == []
    assert model.traffic.steps == 2, "the broken one is not counted"


@pytest.mark.parametrize("num_slots", [0, NUM_LAYERS * NUM_EXPERTS])
def test_nothing_moves_without_slots_or_with_all(num_slots: int) -> None:
    model = make_model(num_slots=num_slots)
    step(model, 3, 0)
    assert model.policy.name == "none" and verify_experts(model) == []


def save_profile(file: Path, *, num_layers: int = NUM_LAYERS) -> None:
    """Of a text that uses an expert twice as often as the one before it."""
    counts_LE = np.tile(2 ** np.arange(NUM_EXPERTS), (num_layers, 1))
    fingerprint = ModelFingerprint(
        architecture="any",
        num_experts=(NUM_EXPERTS,) * num_layers,
        top_k=(TOP_K,) * num_layers,
        router_hash="ab",
    )
    reuse_LB = np.zeros((num_layers, NUM_REUSE_BUCKETS), dtype=np.int64)
    Profile(fingerprint, counts_LE, reuse_LB, num_tokens=128, num_sequences=1).save(file)


def test_a_profile_says_who_has_slots_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    save_profile(file)
    resident_LE = make_model(profile=str(file)).store.placement.resident[:, :NUM_EXPERTS]
    assert resident_LE[:, -3:].all() and resident_LE.sum() == 6
    without_LE = make_model().store.placement.resident[:, :NUM_EXPERTS]
    assert not np.array_equal(without_LE, resident_LE), "the control"


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.npz"
    save_profile(file, num_layers=NUM_LAYERS + 1)
    with pytest.raises(
        ConfigError, match=r"other\.npz` is of another model: MoE layers 2 against 3"
    ):
        make_model(profile=str(file))
    with pytest.raises(CheckpointError, match=r"none\.npz"):
        make_model(profile=str(tmp_path / "none.npz"))


def test_a_wrong_slot_is_found() -> None:
    """The control of every `verify_experts(model) == []` here."""
    model = make_model()
    slot = int(model.store.placement.slot_of[model.store.placement.resident][0])
    model.store.slots.view(slot)[3] ^= 0x40
    wrong = verify_experts(model)
    assert any("differs from" in one for one in wrong)
    assert any("gives other bits" in one for one in wrong)


def test_damaged_weights_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"expert 0 in `layers\.1`"):
        make_model(damaged=True)
