"""Which rates an engine and its plan go by: those measured here, if recent, else the package's."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest
from plan_fakes import cpu, gpu, qwen3_30b

from hotset.core.config import EngineConfig
from hotset.core.hardware import Machine
from hotset.core.hit_curve import assumed_curve
from hotset.core.machine import Figure, MachineDescription
from hotset.core.speed import SpeedModel
from hotset.core.staging import COPY_GBPS, LINK_GBPS, PRODUCT_TFLOPS, Reads
from hotset.core.workload import Workload
from hotset.runtime.known_rates import KEPT_DAYS, described, kept_file, kept_rates, staging_rule

H200 = replace(gpu(), device_name="NVIDIA H200")
SHIPPED = MachineDescription.load("h200")
MEASURED = {"link_zero_copy": 12.0, "link_copy": 13.0, "hbm": 3000.0}


def keep(folder: Path, machine: Machine, *, days: int = 0) -> None:
    date = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=days)
    figures = {
        kind: (Figure(value=value, origin="measured", how="a test", date=date.isoformat()),)
        for kind, value in MEASURED.items()
    }
    kept = MachineDescription(name="here", machine=machine, figures=figures)
    kept.save(kept_file(machine, folder))


def test_what_was_measured_here_comes_before_the_package(tmp_path: Path) -> None:
    before = described(H200, folder=tmp_path)
    assert before is not None and before.figures == SHIPPED.figures
    assert before.source.startswith("`h200` of the package, of 2026-12-0")
    keep(tmp_path, H200, days=3)
    known = described(H200, folder=tmp_path)
    assert known is not None and known.rates().link_gbps == 12.0
    assert known.source.startswith("measured on this machine 3 days ago (`hotset doctor`)")
    # What the probe does not take is the package's, and that is said.
    assert known.rates().layer_us == SHIPPED.rates().layer_us > 0
    names = "`decode_layer`, `decode_experts`, `decode_row`, `prompt_layer`"
    assert f"{names}: `h200` of the package" in known.source


def test_sizes_are_those_of_now_and_the_key_is_the_hardware(tmp_path: Path) -> None:
    keep(tmp_path, H200)
    fuller = replace(H200, vram_free_bytes=1)
    known = described(fuller, folder=tmp_path)
    assert known is not None and known.machine == fuller and known.rates().link_gbps == 12.0
    smaller = replace(H200, vram_total_bytes=1)
    assert kept_rates(smaller, folder=tmp_path) is None
    other = replace(H200, device_name="another GPU")
    assert described(other, folder=tmp_path) is None
    keep(tmp_path, other)
    alone = described(other, folder=tmp_path)
    assert alone is not None and alone.source == "measured on this machine today (`hotset doctor`)"


@pytest.mark.parametrize(("days", "fresh"), [(KEPT_DAYS, True), (KEPT_DAYS + 1, False)])
def test_old_rates_are_not_used(tmp_path: Path, days: int, fresh: bool) -> None:
    keep(tmp_path, H200, days=days)
    assert (kept_rates(H200, folder=tmp_path) is not None) == fresh


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    keep(tmp_path, H200)
    kept_file(H200, tmp_path).write_text("{")
    known = described(H200, folder=tmp_path)
    assert known is not None and known.figures == SHIPPED.figures


def test_whoever_has_no_home_has_measured_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    known = described(H200)
    assert known is not None and known.figures == SHIPPED.figures


def test_nothing_is_known_of_a_cpu(tmp_path: Path) -> None:
    keep(tmp_path, cpu())
    assert described(cpu(), folder=tmp_path) is None


def test_the_plan_says_which_rates_it_went_by(tmp_path: Path) -> None:
    keep(tmp_path, H200, days=1)
    known = described(H200, folder=tmp_path)
    assert known is not None
    speed = SpeedModel.of_machine(qwen3_30b(), known, assumed_curve()).predict(
        slots_per_layer=[32] * 48,
        context_tokens=8192,
        prefill_chunk=2048,
        staging_records=128,
        workload=Workload(),
    )
    assert speed.rates_source.startswith("measured on this machine yesterday")
    assert speed.to_dict()["rates_source"] == speed.rates_source


def test_staging_weighs_by_what_is_known(tmp_path: Path) -> None:
    config = EngineConfig(model="m")
    unknown = staging_rule(qwen3_30b(), config, None)
    assert (unknown.link_gbps, unknown.copy_gbps) == (LINK_GBPS, COPY_GBPS)
    keep(tmp_path, H200)
    known = staging_rule(qwen3_30b(), config, described(H200, folder=tmp_path))
    assert (known.link_gbps, known.copy_gbps) == (12.0, 13.0)
    assert unknown.product_tflops == PRODUCT_TFLOPS
    assert known.product_tflops == described(H200, folder=tmp_path).rates().expert_tflops
    # Eight records, each read twice in place: on an H200 2.97 ms, and 1.97 with copies and two
    # groups. Where the copy engine has a tenth of the link's rate it does not pay.
    reads = Reads(range(8), 16, 0, record_bytes=9_437_184, flops=0.0)
    assert unknown.use_ring(reads, group_records=4)
    slow = replace(known, copy_gbps=1.2)
    assert not slow.use_ring(reads, group_records=4)
    forced = staging_rule(qwen3_30b(), replace(config, staging="in-place"), None)
    assert not forced.use_ring(reads, group_records=4)
