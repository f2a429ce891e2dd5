"""What Triton needs, missing one at a time: named before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotset.core.errors import HardwareError
from hotset.kernels.toolchain import check_triton_toolchain


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A machine that has all of it."""
    monkeypatch.delenv("CC", raising=False)
    compiler = tmp_path / "bin" / "gcc"
    header = tmp_path / "include" / "Python.h"
    ptxas = tmp_path / "triton" / "backends" / "nvidia" / "bin" / "ptxas"
    for path in (compiler, header, ptxas):
        path.parent.mkdir(parents=True)
        path.write_text("")
        path.chmod(0o755)
    return {"compiler": compiler, "header": header, "ptxas": ptxas, "root": tmp_path}


def check(machine: dict[str, Path]) -> None:
    root = machine["root"]
    check_triton_toolchain(
        search_path=str(root / "bin"), include_dir=root / "include", triton_dir=root / "triton"
    )


def test_complete(machine: dict[str, Path]) -> None:
    check(machine)


def test_clang_will_do(machine: dict[str, Path]) -> None:
    machine["compiler"].rename(machine["compiler"].with_name("clang"))
    check(machine)


@pytest.mark.parametrize(
    ("what", "message", "remedy"),
    [
        ("compiler", "no C compiler", "apt install gcc"),
        ("header", "no `Python.h`", "-dev"),
        ("ptxas", "ptxas", "reinstall `triton`"),
    ],
)
def test_one_is_missing(machine: dict[str, Path], what: str, message: str, remedy: str) -> None:
    machine[what].unlink()
    with pytest.raises(HardwareError, match=message) as caught:
        check(machine)
    assert remedy in str(caught.value.hint)


def test_all_that_is_missing_is_named_at_once(machine: dict[str, Path]) -> None:
    machine["compiler"].unlink()
    machine["header"].unlink()
    with pytest.raises(HardwareError, match=r"C compiler.*Python\.h"):
        check(machine)


def test_a_chosen_compiler_must_exist(
    machine: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(HardwareError, match="`CC` is `no-such-compiler`"):
        check(machine)
    monkeypatch.setenv("CC", str(machine["compiler"]))
    check(machine)
