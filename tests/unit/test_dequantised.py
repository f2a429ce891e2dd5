"""Experts that a prompt dequantises once: when, how many at a time, and no bit depends on it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from records import layers, make_store, resident, routed, runner

from hotset.core import staging
from hotset.core.charges import expert_workspaces
from hotset.core.formats import CODES_PER_WORD, PLAIN, WeightFormat, int4
from hotset.core.geometry import ExpertSpec, Gate, GateForm
from hotset.core.staging import DEQUANTISE_TOKENS, DequantiseRule, dequantised_records
from hotset.kernels.dispatch import ReferenceKernels
from hotset.runtime.blocks import Block
from hotset.runtime.moe import MATCH_TOKENS

MANY = MATCH_TOKENS + 8
ALWAYS, NEVER = DequantiseRule(0), DequantiseRule(float("inf"))


def expert(form: WeightFormat, hidden: int = 24, intermediate: int = 20) -> ExpertSpec:
    return ExpertSpec.build(
        hidden=hidden,
        intermediate=intermediate,
        gate=Gate(GateForm.PLAIN),
        has_bias=True,
        dtype="bfloat16",
        weights=form,
    )


PACKED = expert(int4("bfloat16", group=8))


@pytest.fixture
def dequantised(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Which of the records of each call were dequantised, by their places in the call."""
    calls: list[list[int]] = []
    real = ReferenceKernels.dequantise_records

    def noted(
        self: ReferenceKernels,
        address_N: torch.Tensor,
        spec: ExpertSpec,
        out_ND: torch.Tensor,
        *,
        counts_N: torch.Tensor,
    ) -> None:
        calls.append((address_N * counts_N).nonzero()[:, 0].tolist())
        real(self, address_N, spec, out_ND, counts_N=counts_N)

    monkeypatch.setattr(ReferenceKernels, "dequantise_records", noted)
    return calls


def at_a_time(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_DEQUANTISED_BYTES", num * PACKED.as_plain().record_bytes)


@pytest.mark.parametrize("owned", [[], [1, 5, 8, 15], range(16)])
@pytest.mark.parametrize(("num", "ring"), [(1, 6), (5, 2), (16, 64)])
def test_places_and_sizes_change_no_bit(
    owned: Sequence[int], num: int, ring: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(layers(16, experts=[PACKED]), len(owned), staging_records=ring)
    store.place(resident(store, {0: owned}))
    inputs = routed(store, MANY)
    want = runner(store, dequantise=NEVER)(*inputs)
    at_a_time(num, monkeypatch)
    for use_ring in (False, True):
        assert torch.equal(runner(store, use_ring=use_ring, dequantise=ALWAYS)(*inputs), want)
    # Control: one byte of codes.
    store.arena.record(0, 3)[PACKED.layout.field("down").offset] ^= 0x11
    if 3 not in owned:
        assert not torch.equal(runner(store, dequantise=ALWAYS)(*inputs), want)


def test_blocks_share_what_is_dequantised(dequantised: list[list[int]]) -> None:
    """Blocks of few tokens among them keep their own form, and their bits."""
    store = make_store(layers(16, experts=[PACKED]), 3)
    blocks = [Block(*routed(store, size, seed=size)) for size in (MANY, 5, MANY + 1)]
    together = runner(store, dequantise=ALWAYS).run(blocks)
    assert dequantised == [list(range(16))]
    for block, got in zip(blocks, together, strict=True):
        alone = runner(store, dequantise=ALWAYS)(block.x_TH, block.ids_TK, block.weights_TK)
        assert torch.equal(got, alone)


def test_what_has_no_tokens_is_left_alone(dequantised: list[list[int]]) -> None:
    store = make_store(layers(16, experts=[PACKED]))
    x_TH, ids_TK, weights_TK = routed(store, MANY)
    runner(store, dequantise=ALWAYS)(x_TH, ids_TK % 3 + 6, weights_TK)
    assert dequantised == [[6, 7, 8]]


def test_the_shape_of_a_block_decides(dequantised: list[list[int]]) -> None:
    """Tokens an expert on average: with 4 choices of 4 experts, tokens."""
    rule = DequantiseRule()

    def pays(num_tokens: int, spec: ExpertSpec) -> bool:
        return rule.pays(num_tokens, spec=spec, top_k=4, num_experts=4)

    least = DEQUANTISE_TOKENS["int4"]
    assert pays(least, PACKED) and not pays(least - 1, PACKED)
    assert not pays(10**6, expert(PLAIN))
    assert DEQUANTISE_TOKENS.keys() == CODES_PER_WORD.keys(), "every format has a number"
    store = make_store(layers(16, experts=[PACKED]))
    runner(store)(*routed(store, MANY))
    assert dequantised == [], "72 tokens of 16 experts are too few"


def test_a_plan_has_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    large = expert(int4("bfloat16", group=128), 2048, 768)
    assert dequantised_records(large, 128) == 28 and dequantised_records(large, 8) == 8
    assert dequantised_records(expert(PLAIN), 128) == 0
    (line,) = expert_workspaces(layers(8, experts=[large]), "triton")[2:]
    assert line.fixed_bytes == 8 * large.as_plain().record_bytes
    assert len(expert_workspaces(layers(8, experts=[expert(PLAIN)]), "triton")) == 2
    at_a_time(3, monkeypatch)
    assert dequantised_records(PACKED, 16) == 3
    assert dequantised_records(large, 8) == 1, "one always fits"
