"""What an exception in a step means: one request failed, or the device did for good.

Knows torch's errors; nothing of requests.
"""

from __future__ import annotations

import torch

from hotset.core.errors import FatalError, HotsetError, RequestError


def explain_failure(error: BaseException, device: torch.device) -> HotsetError:
    """The error to tell whoever asked for what failed.

    A device error that lasts (an illegal address, a failed assertion, memory that went bad) comes
    back from every later call, so it is found by making one.

    Args:
        error: what a step raised.
        device: that it ran on.

    Returns:
        `FatalError` where nothing runs on the device any more; the error itself where it is meant
        for a user; a `RequestError` otherwise. Each has `error` as its cause.
    """
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    told: HotsetError
    if device.type == "cuda" and not _answers(device):
        told = FatalError(
            f"the device `{device}` failed for good: {words}",
            hint="start a new process; see the driver's log (`dmesg`) for the cause",
        )
    elif isinstance(error, HotsetError):
        return error
    elif isinstance(error, KeyboardInterrupt):
        told = RequestError("the step was interrupted")
    else:
        told = RequestError(
            f"a step failed: {words}", hint="the log has the details; other requests go on"
        )
    told.__cause__ = error
    return told


def forget_frames(error: Exception) -> None:
    """Lets go of the frames that an error and its causes came through: they hold the tensors of the
    step, for as long as somebody keeps the error to tell it."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]


def _answers(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
