"""How far the host may be ahead of the device while a prompt runs: a layer, and no more.

Otherwise a clock on the host would tell when work was queued, not when it was done.
"""

from __future__ import annotations

import torch


class Pace:
    """Of one prompt.

    Args:
        device: that its layers are queued on; a CPU is never behind.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Event | None = None

    @property
    def num_queued(self) -> int:
        """Pieces of the prompt that may not be done yet when `wait` returns."""
        return int(self._device.type == "cuda")

    def wait(self) -> None:
        """Call it between two layers: returns when what had been queued by the call before is
        done."""
        if self._device.type != "cuda":
            return
        before, self._last = self._last, torch.cuda.Event()
        self._last.record()
        if before is not None:
            before.synchronize()

    def catch_up(self) -> bool:
        """Returns when all is done that was queued before the latest `wait`; whether there was
        anything."""
        if self._last is None:
            return False
        self._last.synchronize()
        return True
