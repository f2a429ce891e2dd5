"""Wishes on their way to the device: fixed buffers there, two page-locked ones here.

Knows shapes, numbers and copies; what is wished for, and what comes of it, is not its business.
One copy brings the wishes of all layers, ordered on the current stream: a step sees all of one
set of wishes and nothing of another. The host's side of a set stays as it was sent until the next
but one is written, for the host must replay a step with the wishes that the step ran under.
"""

from __future__ import annotations

import torch

from hotset.core.policy import Wishes


class WishBuffers:
    """Wishes in force on the device, and the next ones being written on the host.

    Sets of wishes are numbered in the order in which they are sent. Number 0 wishes for nothing
    and is in force from the start.

    Args:
        num_layers: L.
        num_victims: V.
        num_experts: E of the widest layer.
        device: where the kernels run.

    Attributes:
        victims_LV, admit_LE: int32 on the device, at the same address for good, so that a
            captured graph sees what was sent last.
        number: of the set in force.
    """

    def __init__(
        self, num_layers: int, num_victims: int, num_experts: int, *, device: torch.device
    ) -> None:
        shapes = ((num_layers, num_victims), (num_layers, num_experts))
        nothing = _flat(Wishes.none(num_layers, num_victims, num_experts))
        on_gpu = device.type == "cuda"
        self._flat = nothing.to(device, copy=True)
        self.victims_LV, self.admit_LE = _split(self._flat, *shapes)
        self._hosts = [nothing.clone().pin_memory() if on_gpu else nothing.clone() for _ in "ab"]
        self._wishes = [
            Wishes(*(part.numpy() for part in _split(host, *shapes))) for host in self._hosts
        ]
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in self._hosts]
        self.number = 0
        self._staged = False

    @property
    def nbytes(self) -> int:
        """Bytes on the device; as many cross the link for each step."""
        return self._flat.numel() * self._flat.element_size()

    def stage(self) -> Wishes:
        """Host arrays for the next set, to be written to until `send`.

        Overwrites the set before the one in force.
        """
        index = (self.number + 1) % 2
        copied = self._copied[index]
        if copied is not None:
            copied.synchronize()  # of two sets ago: over long since, unless that step broke off
        self._staged = True
        return self._wishes[index]

    def send(self) -> int:
        """Brings what was staged into force, and returns the number of the set in force now.

        Without anything new it copies nothing. Ordered on the current stream behind the kernels
        queued there; never to be captured.
        """
        if self._staged:
            self.number += 1
            index = self.number % 2
            self._flat.copy_(self._hosts[index], non_blocking=True)
            copied = self._copied[index]
            if copied is not None:
                copied.record()
            self._staged = False
        return self.number

    def sent(self, number: int) -> Wishes:
        """The set of that number: the one in force, or the one before if none is staged since."""
        kept = (self.number,) if self._staged else (self.number, self.number - 1)
        assert number in kept, f"wishes {number} are gone, {self.number} are in force"
        return self._wishes[number % 2]


def _flat(wishes: Wishes) -> torch.Tensor:
    parts = (wishes.victims_LV, wishes.admit_LE)
    return torch.cat([torch.from_numpy(part).reshape(-1) for part in parts])


def _split(
    flat: torch.Tensor, victims: tuple[int, int], admit: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    size = victims[0] * victims[1]
    return flat[:size].view(victims), flat[size:].view(admit)
