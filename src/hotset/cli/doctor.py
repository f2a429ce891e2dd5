"""`hotset doctor`: prints what this machine is, how fast it is, and what in it will hurt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli.options import Device, Json, named_by_flag
from hotset.cli.outputs import check_writable
from hotset.core.errors import ConfigError
from hotset.core.machine import UNITS, MachineDescription
from hotset.core.units import format_bytes

if TYPE_CHECKING:
    from hotset.runtime.doctor import Environment, Finding


def doctor(
    *,
    device: Device = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again, whatever was measured before.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(help="Print another machine instead: a file, or a name of the package's."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the machine as JSON."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine and print what in it will hurt, each with its remedy.

    Rates are kept for a month. The file that `-o` writes is what `hotset plan --machine` reads, on
    any other machine.

    Example: `hotset doctor -o my-machine.json`
    """
    check_writable(output, flag="--output")
    if machine is not None:
        if fresh or device is not None:
            raise ConfigError(
                f"`{'--fresh' if fresh else '--device'}` is for measuring this machine, and "
                "`--machine` is another one",
                hint="leave one of them out",
            )
        described = MachineDescription.load(machine)
        if output is not None:
            described.save(output)
        if as_json:
            data = {"machine": described.to_dict(), "caveats": described.caveats()}
            typer.echo(json.dumps(data, indent=2))
        else:
            _print_machine(described)
        return
    from hotset.bench.probe import describe_machine
    from hotset.runtime.doctor import Environment, findings, report
    from hotset.runtime.link import read_link

    typer.echo("measuring, or reading what was measured", err=True)
    with named_by_flag():
        described = describe_machine(device, fresh=fresh)
    if output is not None:
        described.save(output)
    environment = Environment.read()
    found = findings(described, environment, read_link())
    if as_json:
        typer.echo(json.dumps(report(described, environment, found), indent=2))
    else:
        _print_machine(described)
        _print_findings(environment, found)


def _print_machine(described: MachineDescription) -> None:
    machine, host = described.machine, described.machine.host
    typer.echo(described.name)
    if machine.device == "cuda":
        free, total = map(format_bytes, (machine.vram_free_bytes, machine.vram_total_bytes))
        typer.echo(f"  device memory  {free} free of {total}")
    typer.echo(
        f"  RAM            {format_bytes(host.available_bytes)} free of "
        f"{format_bytes(host.total_bytes)}, {machine.num_cpu_cores} cores"
    )
    limits = {"container": host.cgroup_limit_bytes, "memlock": host.memlock_limit_bytes}
    words = (f"{k} {'none' if v is None else format_bytes(v)}" for k, v in limits.items())
    typer.echo(f"  limits         {', '.join(words)}")
    if described.link_generation is not None:
        typer.echo(f"  link           PCIe {described.link_generation} x{described.link_width}")
    for kind, points in described.figures.items():
        for point in points:
            size = f" at {format_bytes(point.record_bytes)}" if point.record_bytes else ""
            typer.echo(
                f"  {kind:<14} {point.value:g} {UNITS[kind]}{size}: {point.origin} {point.date}, "
                f"{point.how}"
            )
    if described.notes:
        typer.echo(f"  {described.notes}")


def _print_findings(environment: Environment, found: list[Finding]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    typer.echo(f"  versions       {versions}")
    ready = "can build kernels"
    typer.echo(
        f"  triton         {ready if environment.toolchain is None else environment.toolchain.what}"
    )
    typer.echo("\nwhat will hurt" if found else "\nnothing here will hurt")
    for finding in found:
        typer.echo(f"- {finding.what}\n  remedy: {finding.remedy}")
