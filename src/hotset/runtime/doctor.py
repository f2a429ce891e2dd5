"""What this machine is, and what in it will hurt, each with its remedy.

Knows files of the kernel, versions and measured figures; changes nothing. Useful without a GPU.
"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hotset.core.errors import HardwareError
from hotset.core.hardware import Machine
from hotset.core.machine import MachineDescription, pcie_gbps
from hotset.core.units import GIB, format_bytes
from hotset.kernels.toolchain import check_triton_toolchain
from hotset.runtime.link import Link

_VERSIONED = ("hotset", "torch", "triton", "transformers", "safetensors", "numpy")

# Below this share of what the bus carries, a link is slower than links are: an H200 has 0.88.
_SLOW_LINK = 0.7


@dataclass(frozen=True)
class Finding:
    """Something that will hurt.

    Attributes:
        what: with the value and what it costs.
        remedy: what to do.
    """

    what: str
    remedy: str


@dataclass(frozen=True)
class Environment:
    """What is asked of the system beside sizes and rates.

    Attributes:
        versions: of packages, and of CUDA and driver where there are any.
        is_wsl: Linux under Windows.
        huge_pages: `always`, `madvise` or `never`; empty where the kernel does not say.
        toolchain: what Triton lacks, `None` for nothing.
        capability: of the GPU, `None` without one.
    """

    versions: dict[str, str]
    is_wsl: bool
    huge_pages: str
    toolchain: Finding | None
    capability: tuple[int, int] | None

    @classmethod
    def read(cls, root: Path = Path("/")) -> Environment:
        """This system's.

        Args:
            root: where `proc/` and `sys/` are; a test's folder, or `/`.
        """
        toolchain = None
        try:
            check_triton_toolchain()
        except HardwareError as error:
            toolchain = Finding(error.message, error.hint or "")
        has_gpu = torch.cuda.is_available()
        return cls(
            versions=_versions(root),
            is_wsl="microsoft" in _read(root / "proc/version").lower(),
            huge_pages=_chosen(_read(root / "sys/kernel/mm/transparent_hugepage/enabled")),
            toolchain=toolchain,
            capability=torch.cuda.get_device_capability() if has_gpu else None,
        )


def findings(
    description: MachineDescription, environment: Environment, link: Link | None
) -> list[Finding]:
    """All that will hurt, the worst first."""
    machine = description.machine
    found = [_no_gpu(environment)] if machine.device == "cpu" else _of_gpu(environment)
    if environment.toolchain is not None and machine.device == "cuda":
        found.append(environment.toolchain)
    if machine.device == "cuda":
        found += _of_link(description, link) + _of_locking(machine, environment)
    return found + _of_host(machine, environment)


def _no_gpu(environment: Environment) -> Finding:
    if environment.versions.get("cuda") == "none":
        return Finding(
            "this torch is built without CUDA, so everything runs on the CPU",
            "install a CUDA build of torch if there is an NVIDIA GPU",
        )
    return Finding(
        "torch sees no GPU, so everything runs on the CPU, many times slower",
        "check `nvidia-smi`; in a container pass the GPU in (`--gpus all`)",
    )


def _of_gpu(environment: Environment) -> list[Finding]:
    capability = environment.capability
    if capability is not None and capability < (8, 0):
        version = ".".join(map(str, capability))
        return [
            Finding(
                f"compute capability {version} has no BF16 units",
                "use `--dtype float16`, or a GPU of capability 8.0 or more",
            )
        ]
    return []


def _of_link(description: MachineDescription, link: Link | None) -> list[Finding]:
    found = []
    if link is not None and link.width < link.max_width:
        found.append(
            Finding(
                f"the GPU runs on {link.width} of its {link.max_width} PCIe lanes: every miss "
                f"takes {link.max_width / link.width:g} times as long",
                "put it in a slot with all lanes, and see that no other card shares them",
            )
        )
    if link is not None and link.generation < link.max_generation:
        found.append(
            Finding(
                f"the link runs at PCIe generation {link.generation}, the GPU can "
                f"{link.max_generation}",
                "check slot, riser and the BIOS setting of the slot",
            )
        )
    copied = description.figure("link_copy")
    if link is not None and copied is not None:
        bus = pcie_gbps(link.generation, link.width)
        if copied.value < _SLOW_LINK * bus:
            found.append(
                Finding(
                    f"the link copies {copied.value:g} GB/s of the {bus:.0f} that its lanes carry",
                    "see that nothing else uses it, and that memory is on the GPU's NUMA node",
                )
            )
    return found


def _of_locking(machine: Machine, environment: Environment) -> list[Finding]:
    found = []
    limit, total = machine.host.memlock_limit_bytes, machine.host.total_bytes
    if limit is not None and limit < total // 2:
        found.append(
            Finding(
                f"the memlock limit is {format_bytes(limit)}: the driver may refuse to page-lock "
                "the experts",
                "`ulimit -l unlimited`, in a container `--ulimit memlock=-1`",
            )
        )
    if environment.is_wsl:
        found.append(
            Finding(
                "under WSL2 only about half of the memory can be page-locked",
                "give the VM more memory in `.wslconfig`, or use a smaller model",
            )
        )
    if environment.huge_pages == "never":
        found.append(
            Finding(
                "transparent huge pages are off: page-locking the experts takes far longer",
                "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` as root",
            )
        )
    return found


def _of_host(machine: Machine, environment: Environment) -> list[Finding]:
    host, found = machine.host, []
    if host.cgroup_limit_bytes is not None:
        found.append(
            Finding(
                f"this container may take {format_bytes(host.cgroup_limit_bytes)} of "
                f"{format_bytes(host.total_bytes)} RAM; experts count in full",
                "start it with a higher memory limit (`--memory`)",
            )
        )
    if host.available_bytes < host.total_bytes // 2 and host.cgroup_limit_bytes is None:
        found.append(
            Finding(
                f"only {format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} "
                "RAM is free",
                "end what takes it, or plan with `--ram`",
            )
        )
    if machine.device == "cuda" and host.total_bytes + GIB < machine.vram_total_bytes:
        found.append(
            Finding(
                f"RAM ({format_bytes(host.total_bytes)}) is less than device memory "
                f"({format_bytes(machine.vram_total_bytes)}): experts without room in RAM keep "
                "slots, which then cannot follow the text",
                "add memory, or use a smaller model or format",
            )
        )
    return found


def report(
    description: MachineDescription, environment: Environment, found: list[Finding]
) -> dict[str, Any]:
    """Everything as one JSON object."""
    return {
        "machine": description.to_dict(),
        "caveats": description.caveats(),
        "versions": environment.versions,
        "huge_pages": environment.huge_pages,
        "wsl": environment.is_wsl,
        "triton": "ready" if environment.toolchain is None else environment.toolchain.what,
        "findings": [asdict(finding) for finding in found],
    }


def _versions(root: Path) -> dict[str, str]:
    found = {"python": platform.python_version(), "linux": platform.release()}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    found["cuda"] = torch.version.cuda or "none"
    driver = _read(root / "sys/module/nvidia/version")
    return found | ({"nvidia driver": driver} if driver else {})


def _read(file: Path) -> str:
    """A line of the kernel's; empty where there is no such file."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """The word in brackets of `always [madvise] never`."""
    return text.partition("[")[2].partition("]")[0]
