"""Host memory of a whole model, measured: loading, answering, and giving everything back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from families import make_family
from hotset.core.units import MIB
from tiny import tiny_config

TESTS = Path(__file__).parents[1]

# What threads' stacks, the allocator's own arenas and buffers of the tokenizer come to.
SLACK = 24 * MIB


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """96 experts of 768 KiB; in a process whose earlier memory hides nothing."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_config("qwen3_moe")
    shape = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 6}
    values = {**config.to_dict(), **shape, "num_local_experts": 16, "layer_types": None}
    make_family("qwen3_moe", folder, config=type(config)(**values))
    done = subprocess.run(
        [sys.executable, str(TESTS / "e2e" / "memory_of_a_model.py"), str(folder)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(TESTS / "unit"), str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["arena_bytes"] == 72 * MIB
    return found


def test_loading_peaks_at_what_stays(measured: dict[str, Any]) -> None:
    """HR-12: arena, slots and resident weights, and of these once more what is on its way: what
    four threads read at a time, an eighth of the experts and a record each, or for cold files a
    block of 4 MiB in pages of 2, and the resident weights. No second copy of experts."""
    stays = measured["arena_bytes"] + measured["slot_bytes"] + measured["resident_bytes"]
    read = measured["arena_bytes"] // 8 + 4 * measured["record_bytes"]
    passing = read + 4 * 6 * MIB + measured["resident_bytes"]
    assert passing + SLACK < measured["arena_bytes"], "a second copy would show"
    assert max(measured["load_peaks"]) >= measured["arena_bytes"], "or the measurement is broken"
    assert max(measured["load_peaks"]) <= stays + passing + SLACK


def test_everything_is_given_back(measured: dict[str, Any]) -> None:
    """FT-05: cycle after cycle, flat. Whatever stays adds up; half of what the smallest part would
    come to (12 MiB in nine cycles) is left to the allocator, whose ups and downs were 6 MiB."""
    left = measured["left"]
    smallest = min(measured[f"{part}_bytes"] for part in ("arena", "slot", "resident"))
    assert left[-1] - left[0] < (len(left) - 1) * smallest / 2, left
    assert left[-1] < SLACK, left


def test_an_answer_grows_by_its_cache_only(measured: dict[str, Any]) -> None:
    """MB-16: after 20 tokens nothing grows but the cache, of which two versions may be alive."""
    assert measured["answer_growth"] <= 2 * measured["cache_bytes"] + MIB
