"""Writes docs/reference/ from the code: commands, environment variables, Python API, architectures.

`python scripts/docs.py` writes the pages, `--check` says which are stale and exits with 1. Knows
how a page reads; every word of its content comes from the code.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from docstrings import to_markdown

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"

# Fixed, so that a page does not depend on the terminal it was made in.
HELP_WIDTH = 96
SIGNATURE_WIDTH = 88

WRITTEN = "<!-- Written by `make docs` from the code; change it there. -->"


def main(args: list[str]) -> int:
    """Writes every page, or with `--check` compares; 1 where one is stale."""
    REFERENCE.mkdir(parents=True, exist_ok=True)
    status = 0
    for name, text in pages():
        file = REFERENCE / name
        if args != ["--check"]:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            sys.stderr.write(f"docs/reference/{name} is stale, run `make docs`\n")
            status = 1
    return status


def pages() -> Iterator[tuple[str, str]]:
    """Name and text of every page of docs/reference/."""
    for name, make in (
        ("cli.md", cli_page),
        ("environment.md", environment_page),
        ("api.md", api_page),
        ("architectures.md", architectures_page),
    ):
        yield name, f"{WRITTEN}\n\n{make()}"


def cli_page() -> str:
    """`--help` of every command, as a terminal of `HELP_WIDTH` columns shows it."""
    parts = ["# Command line\n"]
    for path, text, _ in commands():
        parts.append(f"## `{path}`\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def commands() -> Iterator[tuple[str, str, Any]]:
    """Full name, help text and click command of `hotset` and everything below it, groups first."""
    from hotset.cli.main import app

    def walk(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str, Any]]:
        context = command.context_class(
            command, info_name=name, parent=parent, terminal_width=HELP_WIDTH
        )
        with context:
            lines = command.get_help(context).splitlines()
            yield context.command_path, "\n".join(line.rstrip() for line in lines), command
            for below, child in getattr(command, "commands", {}).items():
                yield from walk(child, below, context)

    yield from walk(typer.main.get_command(app), "hotset", None)


def environment_page() -> str:
    """The declared environment variables as a table."""
    from hotset.core import env

    rows = [
        f"| `{var.name}` | {var.text} | {', '.join(f'`{c}`' for c in var.choices) or 'any'} |"
        for var in env.ALL
    ]
    return "\n".join(
        [
            "# Environment variables\n",
            "None of them changes a bit of the output. Besides, huggingface_hub reads its own:\n"
            "`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` and others.\n",
            "| variable | what it does | values |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def api_page() -> str:
    """The Python API from signatures and docstrings."""
    from hotset import api
    from hotset.core import config, errors, plan, request

    loaded: list[Any] = [api.load, api.Model, api.Token, api.Stats]
    values: list[Any] = [
        config.EngineConfig,
        request.SamplingParams,
        request.FinishReason,
        *(plan.MemoryPlan, plan.Side, plan.Line, plan.Choice, plan.Problem),
    ]
    tree: list[Any] = [item for item in vars(errors).values() if inspect.isclass(item)]
    parts = ["# Python API\n", to_markdown(api), ""]
    for item in loaded:
        parts += _entry(item, f"hotset.{item.__name__}")
    parts.append("# Values that it takes and gives\n")
    for item in values:
        parts += _entry(item, f"{item.__module__}.{item.__name__}")
    parts += ["# Errors\n", to_markdown(errors), ""]
    for item in tree:
        parts += _entry(item, f"{item.__module__}.{item.__name__}")
    return "\n".join(parts)


def _entry(item: Any, name: str) -> list[str]:
    """A heading, the signature, the docstring, and for a class its public members."""
    parts = [f"## `{name}`\n"]
    if inspect.isfunction(item):
        parts.append(_fenced(_signature(item.__name__, item)))
    parts += [to_markdown(item), ""]
    if inspect.isclass(item) and issubclass(item, Enum):
        parts += [*(f"- `{member.name}`: `{member.value}`" for member in item), ""]
    elif inspect.isclass(item):
        for member, value in vars(item).items():
            if not member.startswith("_"):
                parts += _member(item.__name__, member, value)
    return parts


def _member(owner: str, name: str, value: Any) -> list[str]:
    function: Callable[..., Any] | None = None
    if isinstance(value, property):
        head = f"{owner}.{name} -> {_annotation(value.fget)}"
        function = value.fget
    elif isinstance(value, classmethod):
        function = value.__func__
        head = _signature(f"{owner}.{name}", function)
    elif inspect.isfunction(value):
        function = value
        head = _signature(f"{owner}.{name}", function)
    if function is None or not function.__doc__:
        return []
    return [f"### `{owner}.{name}`\n", _fenced(head), to_markdown(function), ""]


def _signature(name: str, function: Callable[..., Any]) -> str:
    """`name(parameters) -> result`, one parameter a line where it would be too long."""
    words: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(_parameter(parameter))
    result = _annotation(function)
    one_line = f"{name}({', '.join(words)}) -> {result}"
    if len(one_line) <= SIGNATURE_WIDTH:
        return one_line
    lines = "".join(f"    {word},\n" for word in words)
    return f"{name}(\n{lines}) -> {result}"


def _parameter(parameter: inspect.Parameter) -> str:
    """As written: annotations are strings in this project, which `str` would put in quotes."""
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}: {parameter.annotation}{default}"


def _annotation(function: Any) -> str:
    return str(inspect.signature(function).return_annotation)


def _fenced(code: str) -> str:
    return f"```text\n{code}\n```\n"


def architectures_page() -> str:
    """The model types that the tests run from a saved checkpoint to its logits."""
    sys.path.insert(0, str(ROOT / "tests"))
    names = sorted(importlib.import_module("tiny").TINY_MODEL_TYPES)
    own_cache = importlib.import_module("own_cache").OWN_CACHE
    own_names = {name for why in own_cache for name in why.model_types}
    return "\n".join(
        [
            "# Architectures\n",
            f"The tests make a tiny random checkpoint of each of these {len(names)} model types "
            "(`model_type` of\n`config.json`), load it, and compare it with transformers' own "
            "model. Any other type on transformers'\nexperts interface is tried and refused only "
            "where its experts are not understood.\n",
            "## Answered together\n",
            "Their caches are rows of one pool (keys and values, sliding windows, latents, "
            "states of recurrences\nand convolutions), so several requests share each decode step, "
            "which on CUDA is captured.\n",
            *(f"- `{name}`" for name in names if name not in own_names),
            "\n## Answered one by one\n",
            "They decode launch by launch in transformers' own cache.\n",
            *(_section(why.words, why.model_types) for why in own_cache),
        ]
    )


def _section(words: str, names: Sequence[str]) -> str:
    return "\n".join([f"These {words}:\n", *(f"- `{name}`" for name in names), ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
