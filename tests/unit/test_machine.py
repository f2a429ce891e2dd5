"""Machine descriptions: there and back, those in the package, and what is refused and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_fakes import gpu

from hotset.core.errors import ConfigError
from hotset.core.machine import (
    ORIGINS,
    UNITS,
    Figure,
    MachineDescription,
    pcie_gbps,
    shipped_machines,
)


def figure(value: float = 50.0, **changes: Any) -> Figure:
    known = {"origin": "measured", "how": "a test", "date": "2026-12-01"}
    return Figure(value=value, **{**known, **changes})


def described(**figures: tuple[Figure, ...]) -> MachineDescription:
    return MachineDescription(
        name="a test", machine=gpu(), link_generation=4, link_width=16, figures=figures
    )


def test_there_and_back(tmp_path: Path) -> None:
    machine = described(hbm=(figure(900),), link_copy=(figure(25, record_bytes=2**20), figure(27)))
    machine.save(tmp_path / "machine.json")
    assert MachineDescription.load(tmp_path / "machine.json") == machine


@pytest.mark.parametrize("name", shipped_machines())
def test_each_machine_of_the_package_can_be_predicted_with(name: str) -> None:
    machine = MachineDescription.load(name)
    assert machine.rates(record_bytes=2**20).link_gbps > 0
    assert machine.link_generation is not None and machine.link_width is not None
    bus = pcie_gbps(machine.link_generation, machine.link_width)
    for kind in ("link_zero_copy", "link_copy"):
        assert all(point.value < bus for point in machine.figures[kind])
    # One whose figures are not all of its own says so.
    own = all(point.origin == "measured" for f in machine.figures.values() for point in f)
    assert own == (machine.caveats() == [])


def test_a_rate_is_taken_at_the_nearest_record_size() -> None:
    small, large = figure(30, record_bytes=2**16), figure(50, record_bytes=2**24)
    machine = described(link_zero_copy=(small, large))
    assert machine.figure("link_zero_copy", record_bytes=2**17) == small
    assert machine.figure("link_zero_copy", record_bytes=2**21) == large
    assert machine.figure("link_zero_copy") == large
    assert machine.figure("disk") is None


def test_a_prediction_without_its_figure_is_refused() -> None:
    with pytest.raises(ConfigError, match="no figure `link_copy`"):
        described(link_zero_copy=(figure(),)).rates()


def test_only_what_was_not_measured_is_said() -> None:
    guess = figure(900, origin="datasheet", how="of a leaflet")
    assert described(hbm=(figure(),)).caveats() == []
    assert described(hbm=(figure(), guess)).caveats() == [
        "`hbm` of 900 GB/s is datasheet: of a leaflet"
    ]


def test_pcie_rates() -> None:
    # Generation 4, 16 lanes: 16 GT/s x 16 / 8 bits x 128/130.
    assert pcie_gbps(4, 16) == pytest.approx(31.508, abs=1e-3)
    assert pcie_gbps(2, 1) == pytest.approx(0.5)


GOOD = {"value": 50.0, "origin": "measured", "how": "a test", "date": "2026-12-01"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "`FILE` does not describe a machine"),
        ({"version": 2}, "`FILE` is version 2, this program reads 1"),
        ({"machine": 3}, "`FILE`: `machine` is not an object"),
        ({"colour": "red"}, "`FILE` has unknown `colour`"),
        ({"name": 3}, "`FILE`: `name` is 3, it must be a text"),
        ({"link_width": 3}, "`FILE`: `link_width` is 3, it must be one of 1, 2, 4, 8, 16, 32"),
        ({"link_generation": True}, "`FILE`: `link_generation` is True"),
        ({"figures": []}, "`FILE`: `figures` is not an object"),
        ({"figures": {"speed": [GOOD]}}, "`FILE`: unknown figure `speed`"),
        ({"figures": {"hbm": []}}, "`FILE`: figure `hbm` is not a list of rates"),
        ({"figures": {"hbm": [{"value": 3}]}}, "`FILE`: a rate of `hbm` lacks one of"),
        ({"figures": {"hbm": [GOOD | {"x": 1}]}}, "`FILE`: a rate of `hbm` has unknown `x`"),
        ({"figures": {"hbm": [GOOD | {"value": 0}]}}, "`FILE`: `hbm`: a rate is 0"),
        ({"figures": {"hbm": [GOOD | {"value": "1"}]}}, "`FILE`: `hbm`: a rate is '1'"),
        ({"figures": {"hbm": [GOOD | {"value": float("nan")}]}}, "`FILE`: `hbm`: a rate is nan"),
        ({"figures": {"hbm": [GOOD | {"origin": "x"}]}}, "`FILE`: `hbm`: the origin of a rate"),
        ({"figures": {"hbm": [GOOD | {"how": " "}]}}, "`FILE`: `hbm`: a rate of 50 does not say"),
        ({"figures": {"hbm": [GOOD | {"date": "May"}]}}, "`FILE`: `hbm`: the date of a rate"),
        ({"figures": {"hbm": [GOOD | {"record_bytes": 0}]}}, "`FILE`: `hbm`: `record_bytes` of"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    data = {**described(hbm=(figure(),)).to_dict(), **change}
    with pytest.raises(ConfigError) as caught:
        MachineDescription.from_dict(data, where="FILE")
    assert caught.value.message.startswith(message)


def test_what_is_missing() -> None:
    data = described().to_dict()
    del data["figures"]
    with pytest.raises(ConfigError, match="`FILE` lacks `figures`"):
        MachineDescription.from_dict(data, where="FILE")


@pytest.mark.parametrize("text", ["not json", "[1]", ""])
def test_file_that_is_no_machine(tmp_path: Path, text: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"is not JSON|does not describe a machine"):
        MachineDescription.load(file)


def test_a_name_that_nearly_is_one() -> None:
    with pytest.raises(ConfigError, match="there is no machine `h20`") as caught:
        MachineDescription.load("h20")
    assert caught.value.hint == "did you mean `h200`?"


def test_json_has_every_unit_and_origin_spelled_out() -> None:
    every = {
        kind: (figure(origin=origin),) for kind, origin in zip(UNITS, ORIGINS * 2, strict=False)
    }
    data = json.loads(json.dumps(described(**every).to_dict()))
    assert MachineDescription.from_dict(data, where="FILE") == described(**every)
