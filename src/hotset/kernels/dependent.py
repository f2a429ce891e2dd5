"""Programmatic dependent launch: a kernel is set up, and reads what never changes, while the one
before it still runs.

The rule that makes it safe in any chain of kernels: each one waits for its predecessor before it
touches what another kernel of the step wrote or reads, and only then lets its successor begin. So
whatever has begun knows that all but its direct predecessor are complete. Devices before sm_90, and
the interpreter, launch as ever; it cannot change a bit.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_FIRST_CAPABILITY = (9, 0)


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Behind it everything that earlier kernels wrote is visible, and the next one may begin."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch on `device` whose kernel calls `wait_for_previous`."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


def waiting_launch(dependent: dict[str, Any]) -> dict[str, Any]:
    """The same program, launched when its predecessor has ended: for one that reads ahead of
    `wait_for_previous` what the predecessor may have written."""
    return dependent | {"launch_pdl": False} if dependent["DEPENDENT"] else dependent
