"""What can be verified inside vLLM where files cannot be compared with: no more, and it is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from changed import OLD

from hotset.checkpoint.source import resolve_model

Run = Callable[..., dict[str, Any]]
JOB: dict[str, Any] = {"model": str(resolve_model("pocket")), "hotset": {"vram": "3MiB"}}
AT_START: dict[str, Any] = {**JOB, "hotset": {"vram": "3MiB", "verify": True}}


def test_an_old_transformers_runs_and_refuses_to_verify(run_vllm: Run) -> None:
    """One of the line that vLLM asks for; the plugin needs none of its own until it is asked."""
    ours = run_vllm(**JOB)
    old = run_vllm(**JOB, changed="old transformers", ask_to_verify=False, call="hotset_verify")
    assert "failed" not in old, old["failed"]
    assert old["tokens"] == ours["tokens"] == old["again"]
    assert f"transformers is {OLD}" in old["said"] and "`--no-deps`" in old["said"]


def test_an_old_transformers_ends_a_start_that_verifies(run_vllm: Run) -> None:
    """Before weights are loaded."""
    failed = run_vllm(**AT_START, changed="old transformers")["failed"]
    assert f"transformers is {OLD}" in failed and "Loading weights" not in failed


def test_weights_that_are_made_up_are_compared_with_no_file(run_vllm: Run) -> None:
    """Slots and placements are checked all the same."""
    answer = run_vllm(**AT_START, options={"load_format": "dummy"})
    assert "failed" not in answer, answer["failed"]
    assert answer["verify"] == [[]]
