"""Runs a script that compiles kernels for a GPU that need not be there, and reads its facts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

Facts = list[dict[str, Any]]


def compile_facts(script: str, cache: Path) -> Facts:
    """One row for each kernel of each case of a script of this folder, compiled for sm_90."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(Path(__file__).with_name(script)), "90"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert not result["interpreted"]
    return result["rows"]


def rows(facts: Facts, case: str) -> Facts:
    """Those of one case, one at least."""
    found = [row for row in facts if row["case"] == case]
    assert found
    return found
