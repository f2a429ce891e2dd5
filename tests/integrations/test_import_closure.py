"""The plugin imports nothing of transformers where it is only loaded; read from the source.

vLLM's versions ask for other lines of transformers than hotset (docs/decisions/0002), so a module
that is imported with the plugin must do with whatever is there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hotset

PACKAGE = Path(hotset.__file__).parent
# Only what compares records with files, which `checks` imports when it does.
READS_FILES = "hotset.integrations.vllm.audit"


def file_of(module: str) -> Path | None:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    found = (path / "__init__.py", path.with_suffix(".py"))
    return next((one for one in found if one.is_file()), None)


def imported_with(node: ast.AST) -> Iterator[str]:
    """Every name that is imported when a module is: not inside functions, nor for types alone."""
    for below in ast.iter_child_nodes(node):
        if isinstance(below, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(below, ast.If) and ast.unparse(below.test) == "TYPE_CHECKING":
            continue
        if isinstance(below, ast.Import):
            yield from (alias.name for alias in below.names)
        elif isinstance(below, ast.ImportFrom):
            yield from (f"{below.module}.{alias.name}" for alias in below.names)
        yield from imported_with(below)


def closure(module: str) -> set[str]:
    """All modules of hotset's that are imported with one, and top names of what is not hotset's."""
    reached, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name.split(".")[0] != "hotset":
            reached.add(name.split(".")[0])
            continue
        while (file := file_of(name)) is None:  # a name inside a module
            name = name.rpartition(".")[0]
        if name in reached:
            continue
        reached.add(name)
        waiting += imported_with(ast.parse(file.read_text(encoding="utf-8")))
        waiting += [name.rpartition(".")[0]] if "." in name else []
    return reached


def test_the_plugin_is_imported_without_transformers() -> None:
    names = {path.stem for path in (PACKAGE / "integrations" / "vllm").glob("*.py")}
    modules = {f"hotset.integrations.vllm.{name}" for name in names - {"__init__"}} - {READS_FILES}
    assert "vllm" in closure("hotset.integrations.vllm.layer")
    assert {one for one in modules if "transformers" in closure(one)} == set()


def test_what_reads_files_needs_it() -> None:
    """The control."""
    assert "transformers" in closure(READS_FILES)
