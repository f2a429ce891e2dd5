"""Where missing records are read from is a matter of cost; sizes of blocks are the model's."""

from __future__ import annotations

import pytest
from plan_fakes import expert_of

from hotset.core.config import EngineConfig
from hotset.core.errors import ConfigError
from hotset.core.staging import COPY_GBPS, COPY_US, GROUP_US, LINK_GBPS, StagingRule, block_tokens

RECORD = 9_437_184  # of Qwen3-30B-A3B


def chosen(missing: list[int], reads: int, record_bytes: int = RECORD, **rates: float) -> bool:
    rule = StagingRule(**rates)
    return rule.use_ring(missing, num_reads=reads, record_bytes=record_bytes, group_records=64)


def test_many_records_go_through_the_ring() -> None:
    """96 records: 17.8 ms in place, 16.4 ms by the copy engine and 0.4 to set off."""
    in_place = 96 * RECORD / LINK_GBPS / 1e6
    ring = 96 * RECORD / COPY_GBPS / 1e6 + (48 * COPY_US + 2 * GROUP_US) / 1e3
    assert in_place == pytest.approx(17.8, abs=0.1) and ring == pytest.approx(16.7, abs=0.1)
    assert chosen([e for e in range(128) if e % 8 < 6], reads=96)


def test_few_or_small_records_are_read_in_place() -> None:
    assert not chosen([3], reads=1)
    assert not chosen(list(range(0, 128, 2)), reads=64, record_bytes=12_288)
    assert not chosen([], reads=0)


def test_a_record_that_would_be_read_again_is_staged() -> None:
    """Tokens of one expert that fill several kernel blocks read its record once for each."""
    assert chosen([3], reads=2)


def test_rates_are_those_of_the_machine() -> None:
    missing = [e for e in range(128) if e % 8 < 6]
    assert not chosen(missing, 96, link_gbps=55.0, copy_gbps=50.0)
    assert chosen(missing, 96, link_gbps=10.0, copy_gbps=12.0)


@pytest.mark.parametrize(("mode", "ring"), [("ring", True), ("in-place", False)])
def test_either_can_be_forced(mode: str, ring: bool) -> None:
    for missing, reads in (([3], 1), (list(range(96)), 500)):
        assert chosen(missing, reads, mode=mode) == ring  # type: ignore[arg-type]


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
