"""Pages say what the code does: generated ones are fresh, links lead somewhere, snippets run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT, name_of, script

docs = script("docs")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
IMAGE = re.compile(r'<img[^>]* src="([^"]+)"')
CODE = re.compile(r"`[^`]*`")
DECISIONS = ROOT / "docs" / "decisions"

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("benchmarks/*.md")])


def code_blocks(page: Path, language: str) -> list[str]:
    """Fenced blocks of a page in that language."""
    text = page.read_text(encoding="utf-8")
    return [code for found, code in FENCE.findall(text) if found == language]


def prose(page: Path) -> str:
    """A page without its code."""
    return CODE.sub("``", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_generated_pages_equal_the_code() -> None:
    stale = [
        name
        for name, text in docs.pages()
        if (docs.REFERENCE / name).read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run `make docs`"


def dead_links(page: Path) -> Iterator[str]:
    """Links to files or headings that are not there; the web is not asked."""
    text = prose(page)
    for target in [*LINK.findall(text), *IMAGE.findall(text)]:
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


def test_links_lead_to_files_and_headings() -> None:
    found = {name_of(page): dead for page in PAGES if (dead := [*dead_links(page)])}
    assert found == {}


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[a](page.md#a-heading) [b](page.md#no) [c](none.md) `[d](e)`\n")
    assert list(dead_links(page)) == ["page.md#no", "none.md"]


def commands_in(page: Path) -> list[list[str]]:
    """Arguments of every `hotset` command in a page's shell blocks."""
    lines = "\n".join(code_blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("hotset ")]


def test_commands_in_pages_parse() -> None:
    known = {path: command for path, _, command in docs.commands()}
    for page in PAGES:
        for words in commands_in(page):
            depth = max(n for n in range(3) if " ".join(["hotset", *words[:n]]) in known)
            assert depth > 0, f"{name_of(page)}: there is no command `{words[0]}`"
            path = " ".join(["hotset", *words[:depth]])
            known[path].make_context(path, words[depth:])


def test_make_targets_in_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
        assert set(named) <= targets, name_of(page)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "\nmake test " in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\nexec make test <" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_python_in_pages_compiles() -> None:
    for page in PAGES:
        for code in code_blocks(page, "python"):
            compile(code, name_of(page), "exec")


@pytest.mark.parametrize("name", ["README.md", "docs/guides/python.md"])
def test_python_of_the_first_pages_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = code_blocks(ROOT / name, "python")
    exec(compile(code, name, "exec"), {"__name__": "snippet"})
    assert len(capsys.readouterr().out.split()) > 10, "it prints text and figures"


def test_architectures_that_the_readme_names_are_tested() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("### Architectures")[2].partition("\n## ")[0]
    named = re.findall(r"`([a-z0-9_]+)`", section)
    page = (docs.REFERENCE / "architectures.md").read_text(encoding="utf-8")
    assert len(named) > 5 and [name for name in named if f"- `{name}`\n" not in page] == []


def test_decisions_are_numbered_and_listed() -> None:
    files = sorted(file.name for file in DECISIONS.glob("[0-9]*.md"))
    assert [name[:4] for name in files] == [f"{n:04}" for n in range(1, len(files) + 1)]
    listed = (DECISIONS / "README.md").read_text(encoding="utf-8")
    assert all(f"({name})" in listed for name in files)
