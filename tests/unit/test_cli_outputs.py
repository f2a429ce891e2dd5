"""What commands write is looked at before they work, and tables are whole in narrow terminals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from hotset.cli.outputs import check_apart, check_writable, table_console, whole_file
from hotset.core.errors import ConfigError


def test_what_a_file_has_is_left_as_it_is(tmp_path: Path) -> None:
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("kept")
    check_writable(there, flag="--trace")
    check_writable(new, flag="--trace")
    check_writable(None, flag="--trace")
    assert there.read_text() == "kept" and not new.exists()


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    """It would wait for a reader, and end what the reader reads."""
    os.mkfifo(tmp_path / "pipe")
    check_writable(tmp_path / "pipe", flag="--record")


@pytest.mark.parametrize("name", [".", "none/trace"])
def test_what_cannot_be_written_is_refused_by_its_flag(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"`--trace .*` cannot be written: "):
        check_writable(tmp_path / name, flag="--trace")


def test_a_file_is_written_once_and_not_read_too(tmp_path: Path) -> None:
    same, other = tmp_path / "x" / ".." / "a", tmp_path / "a"
    with pytest.raises(ConfigError, match="`--output` and `--trace` are the same file"):
        check_apart({"--output": same, "--trace": other})
    with pytest.raises(ConfigError, match="`--text` and `--trace` are the same file"):
        check_apart({"--trace": same}, [("--text", other)])
    # One text may be read twice, and what is not given is nothing.
    read = [("--text", other), ("--text", same), ("--prompts", None)]
    check_apart({"--output": tmp_path / "b", "--trace": None}, read)


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("earlier")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as file:
        file.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "earlier" and not file.exists()
    with whole_file(path) as file:
        file.write_text("whole")
    assert path.read_text() == "whole" and not file.exists()
    with pytest.raises(ConfigError, match="cannot be written"), whole_file(tmp_path) as file:
        file.touch()


@pytest.mark.parametrize("columns", ["0", "20", "59", "200"])
def test_no_column_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    names = "first", "second", "third"
    table = Table(*names)
    table.add_row("1" * 9, "2" * 9, "3" * 9)
    table_console().print(table)
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    # Control: rich's own console leaves some out.
    Console().print(table)
    printed = capsys.readouterr().out
    assert all(name in printed for name in names) == (int(columns) >= 59)
