"""The probe, its cache, and what the doctor finds on machines that are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_fakes import gpu
from typer.testing import CliRunner

from hotset.bench import probe
from hotset.cli.main import app
from hotset.core.errors import ConfigError
from hotset.core.hardware import Machine
from hotset.core.machine import Figure, MachineDescription
from hotset.core.units import GIB
from hotset.runtime.doctor import Environment, Finding, findings
from hotset.runtime.link import Link, parse_link

FULL = Link(generation=5, width=16, max_generation=5, max_width=16)
READY = Environment(
    versions={"cuda": "13.0"}, is_wsl=False, huge_pages="madvise", toolchain=None, capability=(9, 0)
)


def described(machine: Machine | None = None, *, copy_gbps: float = 55.0) -> MachineDescription:
    figure = Figure(value=copy_gbps, origin="measured", how="a test", date="2026-12-01")
    machine = machine or sound()
    return MachineDescription(name="a test", machine=machine, figures={"link_copy": (figure,)})


def sound() -> Machine:
    machine = gpu()
    total = 4 * machine.vram_total_bytes
    host = replace(
        machine.host, total_bytes=total, available_bytes=total, cgroup_limit_bytes=None,
        memlock_limit_bytes=None,
    )  # fmt: skip
    return replace(machine, host=host)


def with_host(**changes: Any) -> MachineDescription:
    return described(replace(sound(), host=replace(sound().host, **changes)))


def test_a_sound_machine_has_no_findings() -> None:
    assert findings(described(), READY, FULL) == []


CPU = replace(sound(), device="cpu", vram_total_bytes=0, vram_free_bytes=0)
LACKING = Finding("Triton kernels cannot be built: no C compiler", "`apt install gcc`")


@pytest.mark.parametrize(
    ("description", "environment", "link", "words"),
    [
        (described(), READY, replace(FULL, width=4), "4 of its 16 PCIe lanes: every miss takes 4"),
        (described(), READY, replace(FULL, generation=3), "at PCIe generation 3, the GPU can 5"),
        (described(copy_gbps=40), READY, FULL, "copies 40 GB/s of the 63 that"),
        (with_host(memlock_limit_bytes=65536), READY, FULL, "memlock limit is 64.00 KiB"),
        (with_host(cgroup_limit_bytes=GIB), READY, FULL, "container may take 1.00 GiB of"),
        (with_host(available_bytes=GIB), READY, FULL, "only 1.00 GiB of"),
        (with_host(total_bytes=GIB, available_bytes=GIB), READY, FULL, "is less than device"),
        (described(), replace(READY, is_wsl=True), FULL, "under WSL2"),
        (described(), replace(READY, huge_pages="never"), FULL, "huge pages are off"),
        (described(), replace(READY, toolchain=LACKING), FULL, "no C compiler"),
        (described(), replace(READY, capability=(7, 5)), FULL, "7.5 has no BF16"),
        (described(CPU), READY, None, "torch sees no GPU"),
        (described(CPU), replace(READY, versions={"cuda": "none"}), None, "without CUDA"),
    ],
)
def test_each_thing_that_hurts_is_found_alone_and_has_a_remedy(
    description: MachineDescription, environment: Environment, link: Link | None, words: str
) -> None:
    (finding,) = findings(description, environment, link)
    assert words in finding.what and finding.remedy


def test_the_link_as_the_kernel_reports_it(tmp_path: Path) -> None:
    for name, text in {
        "current_link_speed": "16.0 GT/s PCIe\n",
        "max_link_speed": "32.0 GT/s PCIe\n",
        "current_link_width": "8\n",
        "max_link_width": "16\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert parse_link(tmp_path) == Link(4, 8, 5, 16)
    (tmp_path / "max_link_speed").write_text("Unknown\n")
    assert parse_link(tmp_path) is None
    assert parse_link(tmp_path / "none") is None


def test_environment_of_a_made_up_system(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text("Linux version 6.6 (Microsoft)")
    pages = tmp_path / "sys/kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "enabled").write_text("always madvise [never]\n")
    environment = Environment.read(tmp_path)
    assert environment.is_wsl and environment.huge_pages == "never"
    assert "nvidia driver" not in environment.versions


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Measurements of this machine that take no time, counted."""
    counted: list[int] = []

    def rate(device: object) -> float:
        counted.append(1)
        return 10.0

    monkeypatch.setattr(probe, "read_rate", rate)
    monkeypatch.setattr(probe, "DISK_BYTES", 4 * 2**20)
    return counted


def test_rates_are_measured_once_and_sizes_each_time(
    tmp_path: Path, small_probe: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = probe.describe_machine("cpu", folder=tmp_path)
    assert set(first.figures) == {"cpu_memory", "gemm", "disk"}
    assert all(point.origin == "measured" for f in first.figures.values() for point in f)
    smaller = replace(first.machine, host=replace(first.machine.host, available_bytes=1))
    monkeypatch.setattr(probe, "probe_machine", lambda device: smaller)
    again = probe.describe_machine("cpu", folder=tmp_path)
    assert again.figures == first.figures and again.machine == smaller
    assert len(small_probe) == 1
    probe.describe_machine("cpu", folder=tmp_path, fresh=True)
    assert len(small_probe) == 2


def test_a_home_that_cannot_be_written_is_no_failure(
    tmp_path: Path, small_probe: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    found = probe.describe_machine("cpu", folder=tmp_path / "file")
    assert set(found.figures) == {"cpu_memory", "gemm"}
    assert "measured rates are not kept" in caplog.messages[0]


@pytest.mark.parametrize("change", ["old", "damaged"])
def test_what_is_too_old_or_damaged_is_measured_anew(
    tmp_path: Path, small_probe: list[int], change: str
) -> None:
    probe.describe_machine("cpu", folder=tmp_path)
    (file,) = tmp_path.iterdir()
    data = json.loads(file.read_text())
    data["figures"]["gemm"][0]["date"] = "2020-01-01"
    file.write_text(json.dumps(data) if change == "old" else "{")
    probe.describe_machine("cpu", folder=tmp_path)
    assert len(small_probe) == 2
    probe.describe_machine("cpu", folder=tmp_path)
    assert len(small_probe) == 2


def test_the_command_writes_what_a_plan_reads(
    tmp_path: Path, small_probe: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    args = ["doctor", "--device", "cpu", "-o", str(tmp_path / "m.json")]
    done = CliRunner().invoke(app, [*args, "--json"])
    assert done.exit_code == 0, done.output
    out = json.loads(done.stdout)
    assert MachineDescription.load(tmp_path / "m.json").to_dict() == out["machine"]
    assert out["findings"] and all(f["what"] and f["remedy"] for f in out["findings"])
    words = CliRunner().invoke(app, args).stdout
    assert "cpu_memory     10 GB/s: measured" in words and "remedy: " in words


def test_a_machine_of_the_package_may_be_written_to_a_file(tmp_path: Path) -> None:
    """To be changed by hand; flags that would do nothing beside it are refused."""
    args = ["doctor", "--machine", "rtx-4090", "-o", str(tmp_path / "mine.json")]
    assert CliRunner().invoke(app, args).exit_code == 0
    written = MachineDescription.load(tmp_path / "mine.json")
    assert written.to_dict() == MachineDescription.load("rtx-4090").to_dict()
    for flag in (["--fresh"], ["--device", "cpu"]):
        with pytest.raises(ConfigError, match=f"`{flag[0]}` is for measuring this machine"):
            CliRunner().invoke(app, args + flag, catch_exceptions=False)


@pytest.mark.parametrize("name", ["none/x.json", ""])
def test_a_file_that_cannot_be_is_refused_before_anything_is_measured(
    tmp_path: Path, small_probe: list[int], name: str
) -> None:
    args = ["doctor", "--device", "cpu", "--fresh", "-o", f"{tmp_path}/{name}"]
    with pytest.raises(ConfigError, match=r"`--output .*` cannot be written"):
        CliRunner().invoke(app, args, catch_exceptions=False)
    assert not small_probe


def test_a_device_that_is_none_is_refused(small_probe: list[int]) -> None:
    with pytest.raises(ConfigError, match="`--device` is `xpu`"):
        CliRunner().invoke(app, ["doctor", "--device", "xpu"], catch_exceptions=False)
    assert not small_probe


def test_the_command_prints_a_machine_of_the_package() -> None:
    done = CliRunner().invoke(app, ["doctor", "--machine", "rtx-4090"])
    assert done.exit_code == 0
    assert "PCIe 4 x16" in done.stdout and "estimated" in done.stdout
    data = json.loads(CliRunner().invoke(app, ["doctor", "--machine", "h200", "--json"]).stdout)
    assert data["machine"]["format"] == "hotset-machine"
