"""What belongs to this repository: its root, its files, and the scripts beside the package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "hotset"

CODE = ("src/hotset", "tests", "scripts")


def python_files(*folders: str) -> list[Path]:
    """Every Python file of these folders of the repository (default all code), sorted."""
    return sorted(file for folder in folders or CODE for file in (ROOT / folder).rglob("*.py"))


def name_of(file: Path) -> str:
    """Path of a file relative to the repository's root."""
    return file.relative_to(ROOT).as_posix()


def tracked_texts() -> list[Path]:
    """Text files that git tracks; skips the test where there is no git checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [file for file in files if file.is_file() and b"\0" not in file.read_bytes()]


def script(name: str) -> ModuleType:
    """A script of scripts/ as a module."""
    folder = str(ROOT / "scripts")
    if folder not in sys.path:
        sys.path.append(folder)  # they import each other
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", f"{folder}/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
