"""Tests of the plugin inside vLLM: what they run, and when they are skipped.

vLLM has an environment of its own (requirements-vllm.txt), in which these tests then run; anywhere
else they skip. The files beside this one that need no vLLM say so.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Answer = dict[str, Any]


@pytest.fixture(scope="session")
def run_vllm() -> Callable[..., Answer]:
    """Generates in a process of its own, as vLLM keeps state that it never gives back.

    Calls `generate.py` with a job; the answer has `tokens` and, with hotset, what its workers say.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed (requirements-vllm.txt)")

    def run(**job: Any) -> Answer:
        script = Path(__file__).with_name("generate.py")
        done = subprocess.run(
            [sys.executable, str(script), json.dumps(job)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            return {"failed": done.stdout[-20000:] + done.stderr[-20000:]}
        # vLLM logs to stdout as well, also behind the answer.
        (line,) = (one for one in done.stdout.splitlines() if one.startswith('{"tokens"'))
        answer: Answer = json.loads(line)
        return answer

    return run
