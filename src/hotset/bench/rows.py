"""A measured figure as one JSON line: the schema, and where a run happened. Measures nothing."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import quantiles

import torch

_ROOT = Path(__file__).resolve().parents[3]
_VERSIONED = ("torch", "triton", "transformers", "numpy")


def command() -> str:
    """The command line that repeats this run: without paths of the program and of the rows."""
    program = Path(sys.argv[0]).name
    kept, skip = ["hotset" if program in ("entry.py", "main.py") else program], False
    for argument in sys.argv[1:]:
        if not skip and argument not in ("--debug", "--rows"):
            kept.append(argument)
        skip = argument == "--rows"
    return shlex.join(kept)


def commit() -> str:
    """The checked-out commit, `unknown` outside a checkout."""
    done = subprocess.run(
        ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """GPU, or processor, and core count."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Versions of what the speed depends on."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


@dataclass(frozen=True)
class Spread:
    """Percentiles of repeated measurements."""

    p20: float
    p50: float
    p80: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one or more values, by linear interpolation."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        p20, _, _, p80 = quantiles(values, n=5, method="inclusive")
        return cls(p20, quantiles(values, n=2, method="inclusive")[0], p80, len(values))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure; see benchmarks/README.md for the fields. `None` where a field does not apply.

    Attributes:
        bench, case: what ran, and with which parameters.
        figure, unit: what was measured.
        sol: the speed of light in the same unit, from rates measured in the same run.
        ratio_to_sol: achieved share of it, 1 is the limit.
        baseline, ratio_to_baseline: what it is compared with, measured in the same run.
    """

    bench: str
    case: str
    figure: str
    unit: str
    p20: float
    p50: float
    p80: float
    repeats: int
    sol: float | None = None
    ratio_to_sol: float | None = None
    baseline: str | None = None
    ratio_to_baseline: float | None = None
    command: str = field(default_factory=command)
    commit: str = field(default_factory=commit)
    machine: str = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=versions)
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d"))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def append(rows: Sequence[Row], file: Path) -> None:
    """Adds rows at the end of a file."""
    with file.open("a", encoding="utf-8") as out:
        out.writelines(f"{row.to_json()}\n" for row in rows)
