"""How much memory the control groups of this process still allow, from the kernel's files.

Knows cgroup v1, v2 and both mounted at once; knows nothing of `/proc/meminfo` or of budgets.
A process is held by every group on the path from its own to the top, so each is read: a limit
set by systemd or by an outer container binds as much as the innermost one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hotset.core.errors import HardwareError


@dataclass(frozen=True)
class GroupMemory:
    """One group's limit and what it leaves, in bytes."""

    limit_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class _Version:
    """File names of one cgroup version.

    `soft_limit` is v2's `memory.high`: beyond it a group is slowed to a crawl instead of killed,
    which for a model that lives in that memory is no better.
    """

    limit: str
    soft_limit: str | None
    usage: str
    file_cache: tuple[str, str]


_V1 = _Version(
    "memory.limit_in_bytes",
    None,
    "memory.usage_in_bytes",
    # `total_`: with the groups below, as the usage counts them.
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Version("memory.max", "memory.high", "memory.current", ("inactive_file", "active_file"))


def tightest_group(root: Path = Path("/")) -> GroupMemory | None:
    """The group on this process's path that leaves the least memory, `None` without any limit.

    Args:
        root: where `proc/` and the cgroup mounts are looked up; a test's folder, or `/`.

    Raises:
        HardwareError: a group has a limit whose files cannot be understood.
    """
    groups = [
        group
        for version, folder in _own_groups(root)
        if (group := _read_group(version, folder)) is not None
    ]
    return min(groups, key=lambda group: group.free_bytes, default=None)


def _own_groups(root: Path) -> Iterator[tuple[_Version, Path]]:
    """Every group folder from this process's own up to the mount, of each hierarchy."""
    paths = _own_paths(root)
    for version, mount_root, mount_point in _mounts(root):
        path = paths.get(version)
        if path is None:
            continue
        folder = mount_point / _below(mount_root, path)
        yield version, folder
        while folder != mount_point:
            folder = folder.parent
            yield version, folder


def _own_paths(root: Path) -> dict[_Version, PurePosixPath]:
    """Path of this process in the hierarchies that can hold a memory limit."""
    file = root / "proc/self/cgroup"
    if not file.exists():
        return {}
    paths: dict[_Version, PurePosixPath] = {}
    for line in file.read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[_V1] = PurePosixPath(path)
        elif hierarchy == "0" and not controllers:
            paths[_V2] = PurePosixPath(path)
    return paths


def _mounts(root: Path) -> Iterator[tuple[_Version, PurePosixPath, Path]]:
    """Mounted hierarchies: version, the group that the mount shows as its top, mount point."""
    file = root / "proc/self/mountinfo"
    if not file.exists():
        return
    for line in file.read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split(maxsplit=2)
        mount_root, mount_point = (field.replace("\\040", " ") for field in fields[3:5])
        if kind == "cgroup2":
            version = _V2
        elif kind == "cgroup" and "memory" in options.split(","):
            version = _V1
        else:
            continue
        yield version, PurePosixPath(mount_root), root / mount_point.lstrip("/")


def _below(mount_root: PurePosixPath, path: PurePosixPath) -> PurePosixPath:
    """The process's group relative to the mount.

    A container may see a path from outside its view (`/../..`, or the host's path with only the
    container's own group mounted). Its own limit is then that of the mount's top.
    """
    if ".." in path.parts or not path.is_relative_to(mount_root):
        return PurePosixPath()
    return path.relative_to(mount_root)


def _read_group(version: _Version, folder: Path) -> GroupMemory | None:
    """The group's limit and what is left below it; `None` where it sets no limit.

    File cache is given back by the kernel before anything is killed, and reading a checkpoint
    fills it up to the limit: it does not count as used.
    """
    names = (version.limit, *([version.soft_limit] if version.soft_limit else []))
    limits = [limit for name in names if (limit := _read_limit(folder / name)) is not None]
    if not limits:
        return None
    usage = _read_number(folder / version.usage)
    reclaimable = min(usage, _file_cache(folder / "memory.stat", version.file_cache))
    limit = min(limits)
    return GroupMemory(limit, max(0, limit - (usage - reclaimable)))


def _read_limit(file: Path) -> int | None:
    if not file.exists() or file.read_text().strip() == "max":
        return None
    return _read_number(file)


def _read_number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError) as error:
        raise HardwareError(
            f"the memory limit of this container cannot be read: `{file}`: {error}",
            hint="hotset will not guess how much memory it may take",
        ) from error


def _file_cache(file: Path, names: tuple[str, str]) -> int:
    """Bytes of file cache in a group, 0 where the kernel does not say."""
    if not file.exists():
        return 0
    values = dict(line.split() for line in file.read_text().splitlines())
    return sum(int(values.get(name, 0)) for name in names)
