"""A machine as JSON: there and back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plan_fakes import gpu

from hotset.core.errors import ConfigError
from hotset.core.hardware import Machine


def test_there_and_back() -> None:
    machine = gpu(memlock=65536)
    assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine


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
