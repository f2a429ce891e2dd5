"""docs/cases.md names tests that exist, and every case that a test names."""

from __future__ import annotations

import re
from pathlib import Path

from repository import ROOT, python_files

PAGE = ROOT / "docs" / "cases.md"
FILE = re.compile(r"`((?:unit|parity|e2e|kernels|server|gpu)/\w+\.py)")
TEST = re.compile(r"::(\w+)`")
CASE = re.compile(r"\b(?:MB|HR|LF|QN|CC|PP|LC|SV|UX|FT)-\d\d\b")


def missing(page: str) -> list[str]:
    """Files, and tests within the files that a row names, that are not there."""
    wrong = []
    for row in page.splitlines():
        files = FILE.findall(row)
        paths = [ROOT / "tests" / file for file in files]
        wrong += [file for file, path in zip(files, paths, strict=True) if not path.is_file()]
        source = "".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
        wrong += [name for name in TEST.findall(row) if f"def {name}(" not in source]
    return wrong


def test_the_tests_it_names_exist() -> None:
    assert missing(PAGE.read_text(encoding="utf-8")) == []


def test_the_control_a_test_that_is_gone_is_found() -> None:
    assert missing("| MB-01 | x | `unit/test_planner.py::test_nothing` |") == ["test_nothing"]
    assert missing("| MB-01 | x | `unit/test_gone.py` |") == ["unit/test_gone.py"]


def test_every_case_that_a_test_names_is_on_it() -> None:
    listed = set(CASE.findall(PAGE.read_text(encoding="utf-8")))
    named = {
        case
        for file in python_files("tests")
        for case in CASE.findall(file.read_text(encoding="utf-8"))
    }
    assert len(named) > 50, "the control"
    assert named - listed == set()


def test_every_public_case_is_on_it(shared: Path) -> None:
    """Of the collection that this page answers, where it is at hand."""
    listed = set(CASE.findall(PAGE.read_text(encoding="utf-8")))
    given = set(CASE.findall((shared / "CASES.md").read_text(encoding="utf-8")))
    assert len(given) > 90 and given - listed == set()
