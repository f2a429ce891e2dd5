"""A machine as JSON: there and back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_fakes import gpu

from hotset.core.errors import ConfigError
from hotset.core.hardware import Machine


def test_there_and_back(tmp_path: Path) -> None:
    machine = gpu(memlock=65536)
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(machine.to_dict()))
    assert Machine.load(file) == machine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "tpu"}, "`device` of the machine is `tpu`"),
        ({"vram_total_bytes": -1}, "`vram_total_bytes` of `machine` is -1, not a whole number"),
        ({"vram_free_bytes": "8GiB"}, "`vram_free_bytes` of `machine` is '8GiB'"),
        ({"num_cpu_cores": True}, "`num_cpu_cores` of `machine` is True"),
        ({"colour": "red"}, "`machine` has unknown `colour`"),
        ({"host": 3}, "`host` of the machine is not an object"),
        ({"host": {"total_bytes": 1}}, "`host` lacks `available_bytes`, `cgroup_limit_bytes`"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Machine.from_dict({**gpu().to_dict(), **change})
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("text", ["not json", "[1]"])
def test_file_that_is_no_machine(tmp_path: Path, text: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="machine file"):
        Machine.load(file)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Machine.load(tmp_path / "none.json")
