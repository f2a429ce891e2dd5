"""What a compiled kernel reads and writes before it waits for the kernel before it, by parameter.

Reads PTX line by line. Knows branches and registers, as far as that question needs them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_REGISTER = re.compile(r"%\w+")
_PARAMETER = re.compile(r"ld\.param\S*\s+(%\w+),\s*\[\w+_param_(\d+)\]")
_ACCESS = re.compile(r"\b(ld|st|red|atom)\.global[^\[]*\[\s*(%\w+)")
_LABEL = re.compile(r"(\$\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);")


@dataclass(frozen=True)
class Origin:
    """Where a number comes from: parameters, and those that were read through."""

    given: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()

    def __or__(self, other: Origin) -> Origin:
        return Origin(self.given | other.given, self.read | other.read)

    def names(self) -> frozenset[str]:
        """Parameters that an address begins with; with a star those that say where it is."""
        return self.given or frozenset(f"*{name}" for name in self.read)


def ahead_of_wait(ptx: str, parameters: Sequence[str]) -> tuple[list[str], list[str]]:
    """(read, written) on some path on which nothing was waited for; sorted names of `Origin`.

    Args:
        ptx: of one kernel.
        parameters: its names in order, without those that are compiled in.
    """
    lines = [line.strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    before = [lines[number] for number in sorted(_before_wait(lines))]
    origins: dict[str, Origin] = {}
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for line in before * 2:  # once more for what a loop's end hands to its beginning
        access = _ACCESS.search(line)
        if access:
            found[access[1] == "ld"] |= origins.get(access[2], Origin()).names()
        _follow(line, access, parameters, origins)
    return sorted(found[True]), sorted(found[False])


def _follow(
    line: str,
    access: re.Match[str] | None,
    parameters: Sequence[str],
    origins: dict[str, Origin],
) -> None:
    """What an instruction puts into registers."""
    if given := _PARAMETER.match(line):
        number = int(given[2])
        name = parameters[number] if number < len(parameters) else ""  # Triton adds some
        origins[given[1]] = Origin(given=frozenset([name]))
    elif access:
        read = Origin(read=origins.get(access[2], Origin()).given)
        for register in _REGISTER.findall(line.split("[", maxsplit=1)[0].partition("global")[2]):
            origins[register] = origins.get(register, Origin()) | read
    elif registers := _REGISTER.findall(re.sub(r"^@!?%\w+", "", line)):
        target, *sources = registers
        for source in sources:
            origins[target] = origins.get(target, Origin()) | origins.get(source, Origin())


def _before_wait(lines: Sequence[str]) -> set[int]:
    """Lines that are reached without a wait."""
    labels = [(_LABEL.match(line), number) for number, line in enumerate(lines)]
    places = {label[1]: number for label, number in labels if label}
    reached, todo = set[int](), [0]
    while todo:
        number = todo.pop()
        if number in reached or number >= len(lines):
            continue
        reached.add(number)
        line = lines[number]
        if "griddepcontrol.wait" in line:
            continue
        branch = _BRANCH.search(line)
        if branch:
            todo.append(places[branch[1]])
        if line.startswith("@") or not (branch or line.startswith("ret")):
            todo.append(number + 1)
    return reached
