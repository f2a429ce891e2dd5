"""Prompts on a GPU: copies that overlap with kernels, records teed into slots, planned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hotset
import hotset.api
from hotset.experts.transfer import Downloads
from hotset.models.describe import describe
from hotset.runtime.planning import plan_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG = {"device": "cuda", "context": 2048, "prefill_chunk": 512}
# Four chunks, the last a short one.
LENGTH = 3 * 512 + 40


def prompt(seed: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, 250, (LENGTH,), generator=source).tolist()
    return ids


def vram_for(slot_bytes: int) -> int:
    """A budget that leaves so much for slots and the ring that goes with them."""
    config = hotset.api.make_config("pocket", **LONG, vram="4GiB")
    _, plan = plan_engine(describe("pocket").geometry, config)
    return plan.device.total_bytes - plan.device["slots"] + slot_bytes


def answers(**options: Any) -> tuple[list[list[int]], hotset.Model]:
    """Greedy answers to a few prompts in a row, and the model, closed, to look at."""
    torch.cuda.reset_peak_memory_stats()
    found = []
    with hotset.load("pocket", **{**LONG, **options}) as model:
        for seed in range(4):
            tokens = model.generate(token_ids=prompt(seed), max_tokens=12)
            found.append([token.token_id for token in tokens])
            assert model.engine.store.audit() == []
        planned = model.plan.device.total_bytes - model.plan.device["CUDA context"]
        assert model.stats.device_peak_bytes <= planned
    return found, model


@pytest.fixture(scope="module")
def resident() -> list[list[int]]:
    found, model = answers(vram="4GiB")
    assert model.plan.num_slots == 192 and model.plan.staging_records == 0
    return found


@pytest.mark.parametrize("staging", ["ring", "in-place"])
@pytest.mark.parametrize("policy", ["half-life", "none"])
def test_where_records_come_from_changes_no_token(
    resident: list[list[int]], staging: str, policy: str
) -> None:
    found, model = answers(vram=vram_for(5 * 2**20), staging=staging, policy=policy)
    assert 0 < model.plan.num_slots < 192
    assert (model.plan.staging_records > 0) == (staging == "ring")
    assert found == resident


def test_logits_are_those_of_every_placement(resident: list[list[int]]) -> None:
    """Bit by bit, many times over: a copy that overtakes a kernel shows sooner or later."""
    logits = []
    for options in ({"vram": "4GiB"}, {"vram": vram_for(3 * 2**20), "staging": "ring"}):
        with hotset.load("pocket", **{**LONG, **options}) as model:
            engine = model.engine
            for seed in range(12):
                with engine.steps.exclusive(), engine._sequence(LENGTH) as sequence:
                    last_V = engine._take_in(sequence, prompt(seed % 6), None)
                    logits.append(last_V.cpu())
            assert engine.store.audit() == []
    for seed in range(12):
        assert torch.equal(logits[seed], logits[seed % 6])
        assert torch.equal(logits[seed], logits[12 + seed])


def test_routed_ids_do_not_wait_for_what_is_queued_behind_them() -> None:
    """Kernels are queued for a tenth of a second and more; the ids are there long before."""
    downloads, done = Downloads(), torch.cuda.Event()
    slow = torch.randn(8192, 8192, device="cuda")
    for seed in range(4):
        ids = torch.randint(0, 128, (4096, 8), dtype=torch.int32, device="cuda")
        want = ids.cpu()
        wait = downloads.begin(ids)
        del ids  # its memory may be given away, but not before it is copied
        for _ in range(20):  # 1.1e12 operations each, in FP32
            slow @ slow
        torch.full((4096, 8), seed, dtype=torch.int32, device="cuda")
        done.record()
        assert torch.equal(wait(), want)
        assert not done.query(), "what was queued later has not run yet"
        torch.cuda.synchronize()
