"""The machine that a plan is made for: device memory, host memory and what limits it.

Plain data that also goes to and from JSON (`core.machine` has the file), so that a plan can be made
for another machine. Host memory is read from the kernel's files; the GPU is asked elsewhere,
because that needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hotset.core.cgroup import tightest_group
from hotset.core.config import DEVICES
from hotset.core.errors import ConfigError, HardwareError


@dataclass(frozen=True)
class HostMemory:
    """Host memory, in bytes.

    Attributes:
        total_bytes: installed.
        available_bytes: what may be taken now: the kernel's own estimate (`MemAvailable`), or
            what the tightest control group leaves where that is less.
        cgroup_limit_bytes: limit of that group, `None` where none is below `total_bytes`.
        memlock_limit_bytes: `RLIMIT_MEMLOCK`, `None` when unlimited.
    """

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None = None
    memlock_limit_bytes: int | None = None

    @classmethod
    def read(cls, root: Path = Path("/")) -> HostMemory:
        """Reads this machine's host memory.

        Args:
            root: where `proc/` and the cgroup mounts are looked up; a test's folder, or `/`.

        Raises:
            HardwareError: the kernel's files are missing or cannot be understood.
        """
        meminfo = _meminfo(root / "proc/meminfo")
        total, available = meminfo["MemTotal"], meminfo["MemAvailable"]
        group = tightest_group(root)
        # cgroup v1 writes "no limit" as a number near 2^63.
        binding = group is not None and group.limit_bytes < total
        return cls(
            total_bytes=total,
            available_bytes=min(available, group.free_bytes) if group and binding else available,
            cgroup_limit_bytes=group.limit_bytes if group and binding else None,
            memlock_limit_bytes=_memlock(root / "proc/self/limits"),
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device and its host.

    Attributes:
        device: `cuda` or `cpu`.
        device_name: as the vendor calls it.
        vram_total_bytes, vram_free_bytes: device memory, 0 on a CPU. Free is as the driver says
            it (`cudaMemGetInfo`) once this process has its CUDA context.
        host: host memory.
        num_cpu_cores: cores that this process may use.
    """

    device: str
    device_name: str
    vram_total_bytes: int
    vram_free_bytes: int
    host: HostMemory
    num_cpu_cores: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: a key is missing or unknown, or a value is not what it should be.
        """
        _check_keys("machine", data, cls)
        if data["device"] not in DEVICES:
            raise ConfigError(
                f"`device` of the machine is `{data['device']}`",
                hint=f"one of {', '.join(DEVICES)}",
            )
        host = data["host"]
        if not isinstance(host, Mapping):
            raise ConfigError("`host` of the machine is not an object")
        _check_keys("host", host, HostMemory)
        return cls(**{**data, "host": HostMemory(**host)})


def _check_keys(name: str, data: Mapping[str, Any], cls: type[Machine] | type[HostMemory]) -> None:
    """Every field there, no other, and each number a whole one that is not negative."""
    wanted = {field.name: field.type for field in fields(cls)}
    if missing := sorted(wanted.keys() - data.keys()):
        raise ConfigError(f"`{name}` lacks {', '.join(f'`{key}`' for key in missing)}")
    if unknown := sorted(data.keys() - wanted.keys()):
        raise ConfigError(f"`{name}` has unknown {', '.join(f'`{key}`' for key in unknown)}")
    for key, kind in wanted.items():
        value = data[key]
        if "int" not in str(kind) or (value is None and "None" in str(kind)):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"`{key}` of `{name}` is {value!r}, not a whole number of at least 0")


def _meminfo(file: Path) -> dict[str, int]:
    """`/proc/meminfo` in bytes."""
    if not file.exists():
        raise HardwareError(f"`{file}` is missing, hotset needs Linux to tell how much RAM is free")
    values: dict[str, int] = {}
    for line in file.read_text().splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number:
            values[name] = int(number[0]) * (1024 if number[1:] == ["kB"] else 1)
    for name in ("MemTotal", "MemAvailable"):
        if name not in values:
            raise HardwareError(f"`{file}` does not say `{name}`")
    return values


def _memlock(file: Path) -> int | None:
    """Soft limit of `Max locked memory`; `None` when unlimited or not said."""
    if not file.exists():
        return None
    for line in file.read_text().splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            return None if soft == "unlimited" else int(soft)
    return None
