"""The edges of the process: outputs that take nothing, Ctrl-C before anything is imported."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from hotset.cli import entry

HOTSET = f"{sys.executable} -m hotset.cli.entry"


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("--version > /dev/full", 1, "error: the output cannot be written: No space left"),
        ("simulate --help > /dev/full", 1, "error: the output cannot be written: No space left"),
        ("--version >&-", 2, "error: stdout is closed"),
        ("--version 2>&-", 0, ""),
        ("--help | true", 0, ""),
    ],
)
def test_outputs_that_take_nothing(line: str, code: int, said: str) -> None:
    done = subprocess.run(
        f"{HOTSET} {line}", shell=True, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(said) and bool(done.stderr) == bool(said)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_an_interruption_while_importing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "hotset.cli.main", SimpleNamespace(main=interrupted))
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # for who interrupts a second time


def test_the_entry_imports_no_command() -> None:
    code = "import sys, hotset.cli.entry; print({'typer', 'hotset.cli.main'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
