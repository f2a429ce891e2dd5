"""Dependencies point one way, and core/ needs nothing but the standard library and numpy.

Read from the source (imports inside functions included), and tried by importing core/ in a process
that has nothing else.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import PACKAGE, ROOT, name_of, python_files

# What each part may import besides itself. `hotset` is the package's own __init__, the door to
# `api`; `core` comes last because everything may import it.
ALLOWED = {
    "cli": {"hotset", "api", "server", "bench", "integrations", "runtime", "models", "checkpoint"}
    | {"experts", "kernels", "core"},
    "server": {"hotset", "api", "runtime", "models", "checkpoint", "experts", "kernels", "core"},
    "bench": {"hotset", "api", "runtime", "models", "checkpoint", "experts", "kernels", "core"},
    "integrations": {"runtime", "checkpoint", "experts", "kernels", "core"},
    "hotset": {"api", "core"},
    "api": {"runtime", "models", "checkpoint", "experts", "kernels", "core"},
    "runtime": {"models", "checkpoint", "experts", "kernels", "core"},
    "models": {"checkpoint", "kernels", "core"},
    "checkpoint": {"kernels", "core"},
    "experts": {"kernels", "core"},
    "kernels": {"core"},
    "core": set(),
}
CORE_THIRD_PARTY = {"numpy"}


def part_of(module: str) -> str:
    """`hotset.core.plan` -> `core`; the package itself, and what it re-exports, is `hotset`."""
    part = module.split(".")[1] if "." in module else "hotset"
    return part if part in ALLOWED else "hotset"


def module_of(file: Path) -> str:
    pieces = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(pieces).removesuffix(".__init__")


def imports_of(source: str) -> Iterator[str]:
    """Every name that is imported, wherever in the source: `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong_imports(module: str, source: str) -> list[str]:
    """Imports of a module's source that its part may not have."""
    part = part_of(module)
    wrong = []
    for name in imports_of(source):
        top = name.split(".")[0]
        if top == "hotset":
            if part_of(name) not in ALLOWED[part] | {part}:
                wrong.append(name)
        elif part == "core" and top not in sys.stdlib_module_names | CORE_THIRD_PARTY:
            wrong.append(name)
    return wrong


def test_every_part_of_the_package_is_in_the_table() -> None:
    """A new part: say in `ALLOWED` what it may import, and draw it in docs/architecture.md."""
    inside = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or is_part(path)}
    assert inside - {"__init__"} <= ALLOWED.keys()


def is_part(path: Path) -> bool:
    return (path / "__init__.py").exists()


def test_imports_point_one_way() -> None:
    wrong = {
        name_of(file): found
        for file in python_files("src/hotset")
        if (found := wrong_imports(module_of(file), file.read_text(encoding="utf-8")))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hotset.core.plan", "import torch"),
        ("hotset.core.plan", "def f():\n    from torch import nn"),
        ("hotset.core.plan", "from hotset.kernels.reference import combine"),
        ("hotset.core.plan", "from hotset import kernels"),
        ("hotset.kernels.launch", "import hotset.experts.arena"),
        ("hotset.runtime.engine", "from hotset import load"),
        ("hotset.checkpoint.loader", "from hotset.models.seam import bind_experts"),
        ("hotset.experts.store", "from hotset.checkpoint.index import CheckpointIndex"),
        ("hotset.models.seam", "from hotset.runtime import engine"),
        ("hotset.runtime.engine", "from hotset.api import load"),
        ("hotset.bench.rows", "from hotset.cli.main import app"),
    ],
)
def test_a_wrong_import_is_caught(module: str, source: str) -> None:
    assert wrong_imports(module, source)


def test_the_allowed_directions_have_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {part for part, below in ALLOWED.items() if part not in done and below <= done}
        assert ready, f"a cycle among {sorted(set(ALLOWED) - done)}"
        done |= ready


_ALONE = """
import importlib, sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in sys.stdlib_module_names | {"numpy", "hotset"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert "numpy" in sys.modules and "torch" not in sys.modules
"""


def import_alone(*modules: str) -> subprocess.CompletedProcess[str]:
    """Imports modules where nothing but the standard library, numpy and hotset can be imported."""
    return subprocess.run(
        [sys.executable, "-c", _ALONE, *modules],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def test_core_imports_without_torch() -> None:
    modules = [module_of(file) for file in python_files("src/hotset/core")]
    assert len(modules) > 10
    done = import_alone(*modules)
    assert done.returncode == 0, done.stderr


def test_the_block_works() -> None:
    assert "torch is blocked" in import_alone("hotset.kernels.reference").stderr
