"""requirements.lock is what pyproject.toml asks for, at exact versions that any index has."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import ROOT

PIN = re.compile(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)")


def pins() -> list[str]:
    """Lines of the lock without its comment."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def locked() -> dict[str, str]:
    """Name -> version."""
    matches = [PIN.fullmatch(pin) for pin in pins()]
    assert all(matches), "only exact pins: no index, no local build, no marker"
    return {match[1]: match[2] for match in matches if match}


def test_lock_is_sorted_and_has_each_package_once() -> None:
    names = [pin.split("==")[0] for pin in pins()]
    assert names == sorted(set(names))


def test_lock_satisfies_every_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(text for extra in extras for text in extra)]
    versions = locked()
    for text in wanted:
        requirement = Requirement(text)
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"`{text}` is not in the lock"
        assert requirement.specifier.contains(version), f"`{text}` against {version}"
