"""`hotset plan`: what is printed, what is raised, what help says; model and machine are fakes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import typer
from plan_fakes import gpu, qwen3_30b
from rich.console import Console
from typer.testing import CliRunner, Result

from hotset.cli.plan import plan
from hotset.cli.plan_table import plan_table
from hotset.core.config import EngineConfig
from hotset.core.errors import CapacityError, ConfigError
from hotset.core.geometry import AttentionLayer
from hotset.core.hardware import HostMemory, Machine
from hotset.core.machine import MachineDescription
from hotset.core.planner import PlanRequest, make_plan
from hotset.models.describe import Description
from hotset.runtime.planning import decoded_rows, plan_engine


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs the command on a 24 GiB card; returns the result and what the fakes were asked."""
    asked: dict[str, object] = {}

    def describe(model: str, dtype: str | None = None, revision: str | None = None):
        asked.update(model=model, dtype=dtype, revision=revision)
        return Description(qwen3_30b(), weights_checked=model.startswith("local"))

    def probe_machine(device: str | None):
        asked.update(device=device)
        return gpu()

    monkeypatch.setattr("hotset.models.describe.describe", describe)
    monkeypatch.setattr("hotset.runtime.planning.probe_machine", probe_machine)
    app = typer.Typer()
    app.command()(plan)

    def invoke(*args: str) -> tuple[Result, dict[str, object]]:
        return CliRunner().invoke(app, list(args)), asked

    return invoke


def test_json_has_every_line_in_bytes(run) -> None:
    result, asked = run("some/model", "--vram", "16GiB", "--context", "8192", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 0
    assert data["fits"] is True
    assert data["device"]["budget_bytes"] == 16 * 2**30
    lines = {line["name"]: line["bytes"] for line in data["device"]["lines"]}
    assert lines["KV cache"] == 8192 * 98_304
    assert lines["slots"] == data["num_slots"] * 9_437_184
    assert data["machine"]["device_name"] == "a GPU"
    assert asked == {"model": "some/model", "dtype": None, "revision": None, "device": None}


def test_flags_reach_model_and_machine(run) -> None:
    args = ("m", "--dtype", "float16", "--device", "cuda", "--revision", "abc", "--json")
    _, asked = run(*args)
    assert asked == {"model": "m", "dtype": "float16", "revision": "abc", "device": "cuda"}


def test_every_memory_flag_changes_the_plan_or_is_refused(run) -> None:
    """UX-02: each flag at two values."""

    def planned(*flags: str) -> dict:
        result, _ = run("m", "--json", *flags)
        return json.loads(result.stdout)

    def line(data: dict, name: str) -> int:
        return next(line["bytes"] for line in data["device"]["lines"] if line["name"] == name)

    assert line(planned("--vram", "8GiB"), "slots") < line(planned("--vram", "9GiB"), "slots")
    short, long = planned("--context", "4096"), planned("--context", "8192")
    assert line(long, "KV cache") - line(short, "KV cache") == 4096 * 98_304
    small, large = planned("--prefill-chunk", "64"), planned("--prefill-chunk", "256")
    assert line(large, "activations") - line(small, "activations") == 192 * 60_000
    assert planned("--ram", "60GiB")["host"]["budget_bytes"] == 60 * 2**30
    assert planned("--ram", "50GiB")["slot_only_per_layer"] != []
    assert planned("--ram", "30GiB")["fits"] is False


def test_plan_that_does_not_fit_is_printed_and_raises(run) -> None:
    result, _ = run("m", "--vram", "1GiB", "--json")
    assert isinstance(result.exception, CapacityError)
    assert result.exception.exit_code == 2
    data = json.loads(result.stdout)
    assert data["fits"] is False
    (problem,) = data["problems"]
    assert problem["flag"] == "--vram"
    assert problem["have"] == 2**30
    assert problem["need"] == data["device"]["total_bytes"]


def test_table_has_lines_choices_and_verdict(run) -> None:
    result, _ = run("m", "--vram", "16GiB")
    assert result.stdout.startswith("m on a GPU\n")
    for text in ("resident weights", "expert arena", "budget", "requested", "auto", "as set"):
        assert text in result.stdout
    lines = result.stdout.rstrip().splitlines()
    assert lines[-2:] == ["fits", "weights not checked: only the config is read here"]


def test_whether_weights_were_checked_is_said(run) -> None:
    assert json.loads(run("local", "--json")[0].stdout)["weights_checked"] is True
    assert json.loads(run("hub/id", "--json")[0].stdout)["weights_checked"] is False
    assert "weights" not in run("local")[0].stdout.splitlines()[-1]


def test_table_in_full() -> None:
    plan = make_plan(qwen3_30b(), gpu(memlock=2**23), PlanRequest(context_tokens=4096))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(plan_table(plan, title="[m] on a GPU"))
    text = console.export_text()
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert rows[0] == "[m] on a GPU"
    assert "KV cache │ 384.00 MiB │ 4096 tokens" in rows
    assert "CUDA context │ 544.00 MiB │ the driver's, and loaded kernels" in rows
    assert "memlock limit │ 8.00 MiB │ `ulimit -l`" in rows
    assert "context │ 4096 │ 4096 │ as set" in rows
    assert "vram │ auto │ 24.53 GiB │ what is free, and the CUDA context" in rows
    assert any(row.startswith("warning: 54.00 GiB of host memory") for row in rows)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--vram", "lots"), "`--vram` is `lots`, which is not a size"),
        (("--context", "1"), "`--context` is 1, the least is 2"),
        (("--dtype", "int3"), "`--dtype` is `int3`"),
    ],
)
def test_wrong_values(run, flags: tuple[str, ...], message: str) -> None:
    result, _ = run("m", *flags)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message == message
    assert result.stdout == ""


def test_help_has_an_example(run) -> None:
    result, _ = run("--help")
    assert result.exit_code == 0
    assert "Example: `hotset plan" in result.stdout


def test_command_is_imported_without_torch() -> None:
    code = "import sys, hotset.cli.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_machine_on_paper_is_planned_with_speed_and_a_sweep(run) -> None:
    result, _ = run("m", "--machine", "rtx-4090", "--vram", "16GiB", "--sweep", "--json")
    data = json.loads(result.stdout)
    assert data["machine"]["device_name"] == "NVIDIA GeForce RTX 4090"
    assert data["speed"]["tokens_per_second"] > 1
    assert [row["context_tokens"] for row in data["sweep"]][:2] == [2048, 4096]
    table, _ = run("m", "--machine", "rtx-4090", "--vram", "16GiB", "--sweep")
    for text in ("predicted speed", "tokens/s", "assumed: ", "slots against context"):
        assert text in table.stdout


def test_speed_is_of_as_many_rows_as_a_step_may_have(run) -> None:
    pooled = replace(qwen3_30b(), attention=(AttentionLayer("a", 0, 32, 4, 128, 128, None),))
    one, four = (EngineConfig(model="m", device="cuda", max_batch=rows) for rows in (1, 4))
    assert decoded_rows(pooled, one) == 1 and decoded_rows(pooled, four) == 4
    assert decoded_rows(pooled, replace(four, batch_invariant=True)) == 1
    assert decoded_rows(qwen3_30b(), four) == 1  # one sequence at a time in the library's cache
    machine = MachineDescription.load("rtx-4090")
    speeds = [plan_engine(pooled, c, description=machine)[1].speed for c in (one, four)]
    assert [speed.num_rows for speed in speeds] == [1, 4]
    assert speeds[0].step.total_ms < speeds[1].step.total_ms


def test_a_machine_without_a_gpu_is_planned_without_speed(run, tmp_path) -> None:
    host = HostMemory(total_bytes=256 * 2**30, available_bytes=200 * 2**30)
    file = tmp_path / "cpu.json"
    machine = Machine(
        device="cpu",
        device_name="x86_64",
        vram_total_bytes=0,
        vram_free_bytes=0,
        host=host,
        num_cpu_cores=8,
    )
    MachineDescription(name="a CPU", machine=machine, figures={}).save(file)
    result, _ = run("m", "--machine", str(file), "--sweep", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["speed"] is None


def test_without_rates_no_speed_is_predicted(run) -> None:
    result, _ = run("m", "--json")
    assert json.loads(result.stdout)["speed"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--machine", "rtx-4091"), "there is no machine `rtx-4091`"),
        (("--machine", "h200", "--device", "cpu"), "`--machine` says what device there is"),
        (("--trace", "pocket"), "trace `pocket` is of another model: "),
        (("--trace", "pocket", "--profile", "p.json"), "give either `--trace` or `--profile`"),
    ],
)
def test_wrong_machines_and_routing(run, flags: tuple[str, ...], message: str) -> None:
    result, _ = run("m", *flags)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message.startswith(message)
