"""The kernels of quantised experts compiled for real GPUs, without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("compile_packed.py")
PUBLISHED = ("fp8", "nvfp4", "mxfp4", "int4")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One row for each kernel of each case, compiled for sm_90."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, str(SCRIPT), "90"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert not result["interpreted"]
    return result["rows"]


def rows(facts: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    found = [row for row in facts if row["case"] == case]
    assert found
    return found


def test_any_card_can_run_them(facts: list[dict[str, Any]]) -> None:
    """Shared memory suffices, and no instruction needs a card that knows FP8."""
    assert max(row["shared_bytes"] for row in facts) <= 227 * 1024
    assert not any(row["hardware_fp8"] for row in facts)


def test_subnormal_numbers_are_kept(facts: list[dict[str, Any]]) -> None:
    """Small codes pass through subnormal FP32 numbers on their way."""
    assert not any(row["flushes_subnormals"] for row in facts)


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_token_reads_codes_16_bytes_at_a_time(facts: list[dict[str, Any]], name: str) -> None:
    for row in rows(facts, f"{name}, one token"):
        assert row["loads_16_bytes"] >= 1 and row["stores_16_bytes"] >= 1, row
    # Control: rows that start anywhere cannot be read so.
    assert all(row["stores_16_bytes"] == 0 for row in rows(facts, "int4 zeros, one token"))


@pytest.mark.parametrize("case", ["fp8, small batch", "nvfp4, small batch"])
def test_batches_use_tensor_cores(facts: list[dict[str, Any]], case: str) -> None:
    for row in rows(facts, case):
        assert row["tensor_core"] > 0, row
