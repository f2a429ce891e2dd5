"""The systemd unit, held against systemd's own check."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "deploy" / "hotset.service"
PROGRAM = "/opt/hotset/.venv/bin/hotset"

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze"
)


def verify(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What systemd says of a unit; the program must exist for it, so a stand-in is named."""
    unit = folder / UNIT.name
    unit.write_text(text.replace(PROGRAM, sys.executable))
    return subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    done = verify(UNIT.read_text(), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_misspelt_option_is_found(tmp_path: Path) -> None:
    """The control."""
    done = verify(UNIT.read_text().replace("DynamicUser", "DynamicUsr"), tmp_path)
    assert "DynamicUsr" in done.stderr
