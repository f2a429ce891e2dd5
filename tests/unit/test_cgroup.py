"""What is available inside containers: faked files of cgroup v1, v2, both, nested (HR-06)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotset.core.errors import HardwareError
from hotset.core.hardware import HostMemory
from hotset.core.units import GIB, MIB

V1_UNLIMITED = 9223372036854771712


class FakeHost:
    """A root folder with `/proc` of a 16 GiB machine that has 10 GiB available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 10485760 kB\nHugePages: 0")
        self.write("proc/self/limits", "Max locked memory         65536   65536   bytes")

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def mount(self, *lines: str) -> None:
        self.write("proc/self/mountinfo", "\n".join(lines))

    def v2(self, group: str, *, limit: int | str, current: int, **stat: int) -> None:
        folder = f"sys/fs/cgroup{group}"
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.current", current)
        if stat:
            self.write(f"{folder}/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))

    def v1(self, group: str, *, limit: int, usage: int, **stat: int) -> None:
        folder = f"sys/fs/cgroup/memory{group}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", usage)
        if stat:
            self.write(f"{folder}/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))

    def read(self) -> HostMemory:
        return HostMemory.read(self.root)


V2_MOUNT = "30 23 0:28 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


def test_without_groups_it_is_mem_available(host: FakeHost) -> None:
    assert host.read() == HostMemory(16 * GIB, 10 * GIB, None, 65536)


def test_v2_limit_less_current(host: FakeHost) -> None:
    host.mount(V2_MOUNT)
    host.write("proc/self/cgroup", "0::/box")
    host.v2("/box", limit=2 * GIB, current=512 * MIB)
    assert host.read().available_bytes == 2 * GIB - 512 * MIB
    assert host.read().cgroup_limit_bytes == 2 * GIB


def test_mem_available_binds_where_it_is_less(host: FakeHost) -> None:
    host.mount(V2_MOUNT)
    host.write("proc/self/cgroup", "0::/box")
    host.v2("/box", limit=12 * GIB, current=GIB)
    assert host.read().available_bytes == 10 * GIB
    assert host.read().cgroup_limit_bytes == 12 * GIB


def test_v2_file_cache_is_not_used_memory(host: FakeHost) -> None:
    host.mount(V2_MOUNT)
    host.write("proc/self/cgroup", "0::/box")
    # Shared memory is counted in `file` but cannot be given back.
    host.v2(
        "/box",
        limit=2 * GIB,
        current=2 * GIB,
        file=1600 * MIB,
        shmem=100 * MIB,
        inactive_file=1000 * MIB,
        active_file=500 * MIB,
    )
    assert host.read().available_bytes == 1500 * MIB


def test_v2_outer_group_binds(host: FakeHost) -> None:
    host.mount(V2_MOUNT)
    host.write("proc/self/cgroup", "0::/outer/middle/own")
    host.v2("/outer", limit=3 * GIB, current=2 * GIB)
    host.v2("/outer/middle", limit="max", current=2 * GIB)
    host.v2("/outer/middle/own", limit=2 * GIB, current=GIB // 2)
    assert host.read().available_bytes == GIB
    assert host.read().cgroup_limit_bytes == 3 * GIB


def test_v2_memory_high_counts(host: FakeHost) -> None:
    host.mount(V2_MOUNT)
    host.write("proc/self/cgroup", "0::/box")
    host.v2("/box", limit="max", current=GIB)
    host.write("sys/fs/cgroup/box/memory.high", 4 * GIB)
    assert host.read().available_bytes == 3 * GIB


def test_v1_limit_with_the_groups_below(host: FakeHost) -> None:
    host.mount(V1_MOUNT)
    host.write("proc/self/cgroup", "4:cpu,cpuacct:/other\n3:memory:/a/b\n0::/")
    host.v1("", limit=V1_UNLIMITED, usage=9 * GIB)
    host.v1("/a", limit=5 * GIB, usage=4 * GIB, inactive_file=0, total_inactive_file=GIB)
    host.v1("/a/b", limit=V1_UNLIMITED, usage=GIB)
    assert host.read().available_bytes == 2 * GIB
    assert host.read().cgroup_limit_bytes == 5 * GIB


def test_v1_unlimited_is_no_limit(host: FakeHost) -> None:
    host.mount(V1_MOUNT)
    host.write("proc/self/cgroup", "3:memory:/a")
    host.v1("", limit=V1_UNLIMITED, usage=9 * GIB)
    assert host.read() == HostMemory(16 * GIB, 10 * GIB, None, 65536)


@pytest.mark.parametrize("own", ["/docker/abc", "/elsewhere", "/../../x"])
def test_path_from_outside_the_container(host: FakeHost, own: str) -> None:
    """The container's own group is mounted as the top; the path may be the host's."""
    host.mount(V1_MOUNT.replace("0:32 /", "0:32 /docker/abc"))
    host.write("proc/self/cgroup", f"3:memory:{own}")
    host.v1("", limit=2 * GIB, usage=GIB)
    assert host.read().available_bytes == GIB


def test_both_hierarchies_the_tighter_binds(host: FakeHost) -> None:
    host.mount(V1_MOUNT, V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"))
    host.write("proc/self/cgroup", "3:memory:/a\n0::/b")
    host.v1("/a", limit=3 * GIB, usage=GIB)
    host.write("sys/fs/cgroup/unified/b/memory.max", 2 * GIB)
    host.write("sys/fs/cgroup/unified/b/memory.current", GIB)
    assert host.read().available_bytes == GIB


def test_over_the_limit_leaves_nothing(host: FakeHost) -> None:
    host.mount(V2_MOUNT)
    host.write("proc/self/cgroup", "0::/box")
    host.v2("/box", limit=GIB, current=2 * GIB)
    assert host.read().available_bytes == 0


def test_limit_without_usage_is_not_guessed(host: FakeHost) -> None:
    host.mount(V2_MOUNT)
    host.write("proc/self/cgroup", "0::/box")
    host.write("sys/fs/cgroup/box/memory.max", GIB)
    with pytest.raises(HardwareError, match="memory limit of this container cannot be read"):
        host.read()


def test_missing_meminfo_is_said(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="hotset needs Linux"):
        HostMemory.read(tmp_path)


@pytest.mark.parametrize(("soft", "limit"), [("unlimited", None), ("8388608", 8388608)])
def test_memlock(host: FakeHost, soft: str, limit: int | None) -> None:
    host.write("proc/self/limits", f"Max locked memory         {soft}    unlimited    bytes")
    assert host.read().memlock_limit_bytes == limit


def test_this_machine_reads() -> None:
    memory = HostMemory.read()
    assert 0 < memory.available_bytes <= memory.total_bytes
