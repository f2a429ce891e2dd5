"""What this machine is, for the planner. Reads the driver through torch; measures no rates."""

from __future__ import annotations

import os
import platform

import torch

from hotset.core.config import DEVICES, check_choice
from hotset.core.errors import HardwareError
from hotset.core.hardware import HostMemory, Machine


def probe_machine(device: str | None = None) -> Machine:
    """Describes the machine that the engine would run on.

    Args:
        device: `cuda`, `cpu`, or `None` for CUDA where there is a GPU.

    Raises:
        ConfigError: another name.
        HardwareError: CUDA is asked for and not there.
    """
    host, cores = HostMemory.read(), len(os.sched_getaffinity(0))
    if choose_device(device).type == "cpu":
        return Machine(
            device="cpu",
            device_name=platform.processor() or platform.machine(),
            vram_total_bytes=0,
            vram_free_bytes=0,
            host=host,
            num_cpu_cores=cores,
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return Machine(
        device="cuda",
        device_name=torch.cuda.get_device_name(),
        vram_total_bytes=total_bytes,
        vram_free_bytes=free_bytes,
        host=host,
        num_cpu_cores=cores,
    )


def choose_device(device: str | None) -> torch.device:
    """The device for `cuda`, `cpu` or auto.

    Raises:
        ConfigError: another name.
        HardwareError: CUDA is asked for and not there.
    """
    check_choice("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise HardwareError(
            "there is no CUDA device that torch can use",
            hint="check `nvidia-smi` and that torch is a CUDA build, or use `--device cpu`",
        )
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name, 0) if name == "cuda" else torch.device("cpu")
