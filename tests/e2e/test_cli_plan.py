"""`hotset plan` to its exit code: plans that fit, plans that cannot, and no weight is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotset.checkpoint.reader import ShardReader


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    for name in ("read_into", "read_checked", "read_all"):
        monkeypatch.setattr(ShardReader, name, read)


def test_a_plan_that_fits(run, chatty: Path) -> None:
    done = run("plan", chatty, "--device", "cpu", "--json")
    plan = json.loads(done.out)
    assert done.code == 0 and plan["fits"] is True
    for side in ("device", "host"):
        lines = {line["name"]: line["bytes"] for line in plan[side]["lines"]}
        assert all(isinstance(size, int) for size in lines.values())
        charged = [line["bytes"] for line in plan[side]["lines"] if line["charged"]]
        assert plan[side]["total_bytes"] == sum(charged)
    assert run("plan", chatty, "--device", "cpu").code == 0


@pytest.mark.parametrize("command", ["plan", "generate", "verify"])
def test_a_plan_that_cannot_fit_is_refused(run, chatty: Path, command: str) -> None:
    """MB-05, UX-08: exit code 2, what is needed, what there is, the flag to change; the engine
    refuses by the same plan before it reads a weight."""
    prompt = ["hello"] if command == "generate" else []
    done = run(command, chatty, *prompt, "--device", "cpu", "--vram", "1MiB")
    assert done.code == 2
    cause, hint = done.last_words
    assert cause.startswith("error: `--vram` is 1.00 MiB, the least that works is")
    assert "resident weights" in cause and "KV cache" in cause
    assert hint.startswith("hint: use `--vram ")
    assert "Traceback" not in done.err
    assert done.out == "" or command == "plan", "the plan itself is data"
    least = hint.split("`--vram ")[1].split("`")[0]
    assert run("plan", chatty, "--device", "cpu", "--vram", least).code == 0, "the hint works"


def test_generate_runs_by_the_plan_that_is_printed(run, chatty: Path, monkeypatch) -> None:
    monkeypatch.undo()
    flags = ("--device", "cpu", "--vram", "80MiB", "--context", "128")
    planned = json.loads(run("plan", chatty, *flags, "--json").out)
    done = run("generate", chatty, "hello", *flags, "--max-tokens", "2", "--json")
    assert json.loads(done.out)["stats"]["num_slots"] == planned["num_slots"] > 0
