"""Where missing records are read from is a matter of cost; sizes of blocks are the model's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_fakes import expert_of

from hotset.core.config import EngineConfig
from hotset.core.costmodel import Rates
from hotset.core.errors import ConfigError
from hotset.core.staging import (
    COPY_GBPS,
    COPY_US,
    GROUP_US,
    LINK_GBPS,
    PRODUCT_TFLOPS,
    Reads,
    StagingRule,
    block_tokens,
)

RECORD = 9_437_184  # of Qwen3-30B-A3B
THREE_OF_FOUR = [e for e in range(128) if e % 8 < 6]


def chosen(
    missing: list[int],
    reads: int,
    *,
    dequantised: int = 0,
    record_bytes: int = RECORD,
    flops: float = 0.0,
    group: int = 64,
    **rule: Any,
) -> bool:
    wanted = Reads(missing, reads, dequantised, record_bytes=record_bytes, flops=flops)
    return StagingRule(**rule).use_ring(wanted, group_records=group)


def test_many_records_go_through_the_ring() -> None:
    """96 records: 17.8 ms in place, 16.6 by the copy engine and 0.6 for the last group."""
    in_place = 96 * RECORD / LINK_GBPS / 1e6
    ring = 96 * RECORD / COPY_GBPS / 1e6 + (48 * COPY_US + GROUP_US) / 1e3
    assert in_place == pytest.approx(17.8, abs=0.1) and ring == pytest.approx(17.2, abs=0.1)
    assert chosen(THREE_OF_FOUR, reads=96)


def test_few_or_small_records_are_read_in_place() -> None:
    assert not chosen([3], reads=1)
    assert not chosen(list(range(0, 128, 2)), reads=64, record_bytes=12_288)
    assert not chosen([], reads=0)


def test_a_record_that_would_be_read_again_is_staged() -> None:
    """Tokens of one expert that fill several kernel blocks read its record once for each."""
    eight = list(range(8))
    assert chosen(eight, reads=16) and not chosen(eight, reads=8)


def test_what_is_dequantised_is_copied_beside_products() -> None:
    """8,192 tokens of INT4 records: the copies' 4.3 ms have the products' 1.6 beside them, reads in
    place have not. A kernel that multiplies as it reads has, and then a fast link suffices. In
    small groups the host is the slowest (on an H200 9.0 ms in place, 13.6 in groups of 8)."""
    int4, flops = 2_433_024, 8192 * 8 * 6 * 2048 * 768
    layer = {"record_bytes": int4, "flops": flops}
    copies = 96 * int4 / COPY_GBPS / 1e6
    assert flops / PRODUCT_TFLOPS / 1e9 == pytest.approx(1.57, abs=0.01)
    assert copies == pytest.approx(4.23, abs=0.01)
    assert chosen(THREE_OF_FOUR, 0, dequantised=96, **layer)
    assert chosen(THREE_OF_FOUR, 0, dequantised=96, link_gbps=60.0, **layer)
    assert not chosen(THREE_OF_FOUR, 96, link_gbps=60.0, **layer)
    assert not chosen(THREE_OF_FOUR, 0, dequantised=96, group=8, **layer)


def test_many_small_groups_take_the_host_longer_than_the_link() -> None:
    """Of 1 MB records one takes 18 us, a group of one 600: in groups of 32 they are staged."""
    small = {"record_bytes": 1_000_000, "reads": 256}
    assert not chosen(THREE_OF_FOUR, group=1, **small)
    assert chosen(THREE_OF_FOUR, group=32, **small)


def test_rates_are_those_of_the_machine() -> None:
    assert not chosen(THREE_OF_FOUR, 96, link_gbps=55.0, copy_gbps=50.0)
    assert chosen(THREE_OF_FOUR, 96, link_gbps=10.0, copy_gbps=12.0)
    known = Rates(10.0, 12.0, 900.0, gemm_tflops=70.0)
    assert StagingRule.at("ring", known) == StagingRule("ring", 10.0, 12.0, 70.0)
    assert StagingRule.at(None, replace(known, expert_tflops=50.0)).product_tflops == 50.0
    assert StagingRule.at(None, replace(known, gemm_tflops=None)).product_tflops == PRODUCT_TFLOPS


@pytest.mark.parametrize(("mode", "ring"), [("ring", True), ("in-place", False)])
def test_either_can_be_forced(mode: str, ring: bool) -> None:
    for missing, reads in (([3], 1), (list(range(96)), 500)):
        assert chosen(missing, reads, mode=mode) == ring


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="`staging` is `rign`") as caught:
        EngineConfig(model="m", staging="rign")
    assert caught.value.hint == "did you mean `ring`?"


@pytest.mark.parametrize(
    ("hidden", "top_k", "tokens"),
    [(2048, 8, 4096), (7168, 8, 1024), (64, 2, 4096), (8192, 64, 256)],
)
def test_blocks_hold_256_mib_of_outputs(hidden: int, top_k: int, tokens: int) -> None:
    assert block_tokens(expert_of(hidden, 64), top_k) == tokens
    assert tokens == 256 or 4 * top_k * hidden * tokens <= 256 * 2**20
