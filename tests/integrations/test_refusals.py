"""Every option of vLLM's that changes experts is refused by its name; so is reading them again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refused import OPTIONS

from hotset.checkpoint.source import resolve_model


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Option -> what is said of it; all of them in one process."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed (requirements-vllm.txt)")
    script = Path(__file__).with_name("refused.py")
    command = [sys.executable, str(script), str(resolve_model("pocket"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    (line,) = (one for one in done.stdout.splitlines() if one.startswith('{"refused"'))
    answer: dict[str, str] = json.loads(line)["refused"]
    return answer


@pytest.mark.parametrize("option", [option for option, _, _ in OPTIONS])
def test_an_option_that_changes_experts_is_named(option: str, said: dict[str, str]) -> None:
    assert f"`{option}` does not work with hotset: " in said[option]


def test_weights_are_not_read_again(run_vllm: Callable[..., Any]) -> None:
    """Neither from files nor from what a trainer sends; the model goes on as it was."""
    answer = run_vllm(
        model=str(resolve_model("pocket")), hotset={"vram": "3MiB"}, call="reload_weights"
    )
    assert "`reload_weights` does not work with hotset" in answer["said"]
    assert answer["again"] == answer["tokens"]
