"""The PCIe link of the GPU as the kernel reports it. Knows sysfs; measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotset.core.machine import LANE_GTS

_GENERATIONS = {rate: generation for generation, rate in LANE_GTS.items()}


@dataclass(frozen=True)
class Link:
    """A link as it runs now, and as device and slot could run it.

    Attributes:
        generation, width: now; an idle link may report a lower generation.
        max_generation, max_width: of the device.
    """

    generation: int
    width: int
    max_generation: int
    max_width: int


def read_link(root: Path = Path("/")) -> Link | None:
    """The link of the current GPU; `None` without one, or where the kernel does not say.

    Args:
        root: where `sys/` is; a test's folder, or `/`.
    """
    if not torch.cuda.is_available():
        return None
    device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    ids = (device.pci_domain_id, device.pci_bus_id, device.pci_device_id)
    return parse_link(root / "sys/bus/pci/devices" / "{:04x}:{:02x}:{:02x}.0".format(*ids))


def parse_link(folder: Path) -> Link | None:
    """The link from the device's folder in sysfs."""
    try:
        generations = [
            _GENERATIONS[float((folder / name).read_text().split()[0])]
            for name in ("current_link_speed", "max_link_speed")
        ]
        widths = [
            int((folder / name).read_text()) for name in ("current_link_width", "max_link_width")
        ]
    except (OSError, ValueError, KeyError, IndexError):
        return None  # in a virtual machine the files may be missing or say "Unknown"
    return Link(generations[0], widths[0], generations[1], widths[1])
