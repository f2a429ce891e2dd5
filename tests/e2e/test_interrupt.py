"""Ctrl-C while a model loads: it ends at once, in words, with the shell's exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_ctrl_c_while_loading(chatty: Path) -> None:
    """96 pieces at a tenth of a second: the rest of them is not waited for."""
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "e2e" / "slow_loading.py"), "generate", str(chatty), "hi"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == "", "nothing was answered"
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "error: interrupted"
