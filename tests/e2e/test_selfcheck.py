"""The self-check: memory of a loaded model is what was planned, and what is not is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hotset
from hotset.core.machine import MachineDescription
from hotset.core.units import MIB
from hotset.runtime import selfcheck
from hotset.runtime.selfcheck import Check, check_speed


@pytest.fixture(scope="module")
def model() -> Iterator[hotset.Model]:
    with hotset.load("pocket", device="cpu", vram="96MiB", context=512) as loaded:
        yield loaded


def test_every_line_of_a_loaded_model_is_as_planned(model: hotset.Model) -> None:
    checks = {check.name: check for check in model.self_check()}
    names = {"resident weights", "slots", "staging ring", "expert arena", "KV cache"}
    assert checks.keys() == names
    assert all(check.is_right for check in checks.values()), [str(c) for c in checks.values()]
    # To the byte, where nothing is rounded: the weights are 6 MiB, the slots most of the budget.
    for name in ("resident weights", "slots", "expert arena"):
        assert checks[name].measured == checks[name].planned > MIB


def test_a_line_that_is_off_is_found_and_said() -> None:
    off = Check("slots", "bytes", 100 * MIB, 111 * MIB)
    assert not off.is_right
    assert str(off) == "slots: planned 100.00 MiB, measured 111.00 MiB (+11.0%)"
    assert Check("slots", "bytes", 100 * MIB, 109 * MIB).is_right
    assert Check("device peak", "bytes", 100 * MIB, 50 * MIB, is_limit=True).is_right
    assert not Check("device peak", "bytes", 100 * MIB, 120 * MIB, is_limit=True).is_right
    assert Check("staging ring", "bytes", 0, 0).to_dict()["ok"]


def test_speed_is_judged_after_enough_tokens_where_rates_are_known(
    model: hotset.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checks(**changes: float) -> list[Check]:
        figures = {"num_tokens": 200, "tokens_per_second": 100.0, "hit_rate": 0.5}
        return [*check_speed(model.engine, **(figures | changes))]

    assert checks() == []  # nobody knows this CPU
    monkeypatch.setattr(selfcheck, "described", lambda _: MachineDescription.load("h200"))
    (check,) = checks()
    assert (check.unit, check.measured) == ("ms", 10.0)
    assert check.planned < 1  # a 6M model on an H200
    assert not check.is_right
    (right,) = checks(tokens_per_second=1e3 / check.planned)
    assert right.is_right
    assert checks(num_tokens=99) == []
