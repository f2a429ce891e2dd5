"""What Triton needs on a machine at run time: a C compiler, Python's headers, its own ptxas.

Checked before a model is loaded, since Triton itself fails minutes later, at the first launch.
Looks, builds nothing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from hotset.core.errors import HardwareError


def check_triton_toolchain(
    *,
    search_path: str | None = None,
    include_dir: str | Path | None = None,
    triton_dir: str | Path | None = None,
) -> None:
    """Returns when Triton can build its launchers and kernels here.

    Args:
        search_path: directories where a compiler is looked for; the environment's `PATH`.
        include_dir: directory of `Python.h`; that of the running interpreter.
        triton_dir: the installed triton package; the importable one.

    Raises:
        HardwareError: names all that is missing, with the packages to install.
    """
    missing = [
        problem
        for problem in (
            _compiler_problem(search_path),
            _headers_problem(include_dir),
            _ptxas_problem(triton_dir),
        )
        if problem is not None
    ]
    if missing:
        raise HardwareError(
            "Triton kernels cannot be built: " + "; ".join(what for what, _ in missing),
            hint="; ".join(remedy for _, remedy in missing),
        )


def _compiler_problem(search_path: str | None) -> tuple[str, str] | None:
    chosen = os.environ.get("CC")
    if chosen:
        if shutil.which(chosen, path=search_path):
            return None
        return f"`CC` is `{chosen}`, which is no program", "set `CC` to a C compiler or unset it"
    if any(shutil.which(name, path=search_path) for name in ("gcc", "clang")):
        return None
    return "no C compiler (`gcc` or `clang`)", "`apt install gcc` or `dnf install gcc`"


def _headers_problem(include_dir: str | Path | None) -> tuple[str, str] | None:
    if include_dir is None:
        # Triton asks for the same one: Debian's own scheme points to a directory without headers.
        scheme = sysconfig.get_default_scheme()
        scheme = "posix_prefix" if scheme == "posix_local" else scheme
        include_dir = sysconfig.get_paths(scheme=scheme)["include"]
    if (Path(include_dir) / "Python.h").is_file():
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"no `Python.h` in `{include_dir}`",
        f"`apt install python{version}-dev` or `dnf install python{version}-devel`",
    )


def _ptxas_problem(triton_dir: str | Path | None) -> tuple[str, str] | None:
    if triton_dir is None:
        spec = importlib.util.find_spec("triton")
        if spec is None or not spec.submodule_search_locations:
            return "the package `triton` is not installed", "`pip install triton`"
        triton_dir = spec.submodule_search_locations[0]
    ptxas = Path(triton_dir) / "backends" / "nvidia" / "bin" / "ptxas"
    if os.access(ptxas, os.X_OK):
        return None
    return f"no `{ptxas}`", "reinstall `triton`: `pip install --force-reinstall triton`"
