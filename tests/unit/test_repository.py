"""Habits of the repository: sizes, docstrings, collected tests, environment, machine paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from repository import name_of, python_files, tracked_texts

from hotset.core import env

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_ENV_VARS = 10

# Longer functions, each with the answer to "why is this not two?".
LONG_FUNCTIONS = {
    "src/hotset/cli/bench.py::prefill": "its signature is one line for each flag",
    "src/hotset/cli/bench_decode.py::decode": "its signature is one line for each flag",
    "src/hotset/cli/chat.py::chat": "its signature is one line for each flag",
    "src/hotset/cli/generate.py::generate": "its signature is one line for each flag",
    "src/hotset/cli/plan.py::plan": "its signature is one line for each flag",
    "src/hotset/cli/profile_make.py::make": "its signature is one line for each flag",
    "src/hotset/cli/serve.py::serve": "its signature is one line for each flag",
    "src/hotset/cli/simulate.py::simulate": "its signature is one line for each flag",
}

# The only file that may ask the environment, and what Triton itself reads.
ENVIRONMENT_READERS = {"src/hotset/core/env.py", "src/hotset/kernels/toolchain.py"}

# A path that exists on one machine only. Written so that this line does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:work|root|home|Users|mnt)/\w")

# Memory that the driver moves between host and device as it likes: slots would come to lie on the
# host without anybody being told.
MANAGED = re.compile(r"MallocManaged|managed_memory|cudaMemAttach")

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def source_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def functions(source: str) -> Iterator[FUNCTION]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTION))


def num_lines(function: FUNCTION) -> int:
    """From `def` to the last line, docstring included."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_files_stay_within_their_size() -> None:
    sizes = {name_of(file): len(source_of(file).splitlines()) for file in python_files()}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_functions_stay_within_their_size() -> None:
    long = {
        f"{name_of(file)}::{function.name}": num_lines(function)
        for file in python_files()
        for function in functions(source_of(file))
        if num_lines(function) > MAX_FUNCTION_LINES
    }
    assert {name: size for name, size in long.items() if name not in LONG_FUNCTIONS} == {}
    assert LONG_FUNCTIONS.keys() <= long.keys(), "no longer long: take it off the list"


def test_modules_say_what_they_know() -> None:
    silent = [name_of(f) for f in python_files() if not ast.get_docstring(ast.parse(source_of(f)))]
    assert silent == []


def is_test(node: ast.AST) -> bool:
    """A test function, a test class, or a state machine's `TestX = Machine.TestCase`."""
    if isinstance(node, FUNCTION):
        return node.name.startswith("test_")
    if isinstance(node, ast.ClassDef):
        return node.name.startswith("Test") and any(map(is_test, node.body))
    names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
    return any(name.startswith("Test") for name in names)


def test_tests_are_where_pytest_finds_them() -> None:
    for file in python_files("tests"):
        num_tests = sum(map(is_test, ast.parse(source_of(file)).body))
        if file.name.startswith("test_"):
            assert num_tests > 0, f"{name_of(file)} is a test file without a test"
        else:
            assert num_tests == 0, f"pytest does not collect the tests of {name_of(file)}"


def environment_reads(source: str) -> list[str]:
    """Where a source touches the process environment."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            found.append(f"line {node.lineno}: {node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names} & {"environ", "environb", "getenv"}
            found += [f"line {node.lineno}: {name}" for name in names]
    return found


def test_the_environment_is_read_in_one_place() -> None:
    reads = {name_of(f): environment_reads(source_of(f)) for f in python_files("src/hotset")}
    found = {name: lines for name, lines in reads.items() if lines}
    assert found.keys() <= ENVIRONMENT_READERS, found


def test_an_environment_read_is_caught() -> None:
    assert environment_reads("import os\nx = os.environ['X']")
    assert environment_reads("import os\nx = os.getenv('X')")
    assert environment_reads("from os import environ")


def test_environment_variables_are_few_and_described() -> None:
    names = [var.name for var in env.ALL]
    assert len(names) == len(set(names)) <= MAX_ENV_VARS
    declared = [value for value in vars(env).values() if isinstance(value, env.EnvVar)]
    assert sorted(names) == sorted(var.name for var in declared), "each is in env.ALL"
    assert all(var.name.startswith("HOTSET_") and var.text for var in env.ALL)


def test_no_file_names_a_path_of_one_machine() -> None:
    found = [
        f"{name_of(file)}:{number}: {line.strip()[:80]}"
        for file in tracked_texts()
        for number, line in enumerate(source_of(file).splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_a_machine_path_is_caught() -> None:
    folder = "/".join(["", "home", "someone", "models"])
    assert MACHINE_PATH.search(f"model = '{folder}'")
    assert not MACHINE_PATH.search("see docs/work/x, ~/home/x and https://example.org/home/x")


def test_no_memory_is_the_drivers_to_move() -> None:
    """PP-12."""
    found = [name_of(file) for file in python_files("src") if MANAGED.search(source_of(file))]
    assert found == []
    assert MANAGED.search("driver.cudaMallocManaged(size)")
