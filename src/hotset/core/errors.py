"""The error tree. Knows messages, hints and exit codes; knows nothing about what failed.

    HotsetError
    +-- ConfigError      a flag, an environment variable or a parameter is wrong
    +-- CheckpointError  files on disk are missing, damaged or not understood
    +-- CapacityError    it does not fit: VRAM, host RAM, disk, context
    +-- RequestError     one request is wrong; the engine goes on
    |   +-- ContextLengthError   longer than the context
    |   +-- QueueFullError   too many requests wait already
    +-- HardwareError    the machine lacks something or failed
        +-- FatalError       a device failed for good; only a new process helps

A user's mistake raises one of these; an `assert` is for our own bugs only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class HotsetError(Exception):
    """Base of all errors meant for a user.

    Args:
        message: what is wrong, the value and the limit, one sentence without a full stop.
        hint: what to do next (a flag, a command); shown on its own line.
        option: the option that is wrong, where it is one; the message has it in backquotes.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, option: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.option = option

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n\nhint: {self.hint}"


class ConfigError(HotsetError):
    """A setting is wrong: unknown name, bad value, two settings that exclude each other."""

    exit_code = 2


class CheckpointError(HotsetError):
    """A checkpoint is missing, damaged, incomplete or in a form that is not understood."""


class CapacityError(HotsetError):
    """Something does not fit; the message has need, have and the flag to change."""

    exit_code = 2


class RequestError(HotsetError):
    """One request is wrong or cannot be served; nothing else is affected."""


class ContextLengthError(RequestError):
    """Prompt and answer together are longer than the context.

    Attributes:
        num_prompt: tokens of the prompt.
        num_new: most new tokens that were asked for; `None` where nothing was said.
        context_tokens: the limit.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        num_prompt: int,
        num_new: int | None,
        context_tokens: int,
    ) -> None:
        super().__init__(message, hint=hint)
        self.num_prompt, self.num_new = num_prompt, num_new
        self.context_tokens = context_tokens


class QueueFullError(RequestError):
    """As many requests wait as may; the same request may be taken later."""


class HardwareError(HotsetError):
    """The machine lacks what is needed, or a device failed."""


class FatalError(HardwareError):
    """A device failed in a way that lasts: nothing runs on it any more in this process."""


@contextmanager
def explain_out_of_memory(
    component: str, *, hint: str, error: type[HotsetError] = CapacityError
) -> Iterator[None]:
    """Calls an allocation that fails within the block what it is.

    Args:
        component: what the memory is for, with its size where that is known.
        hint: what to do.
        error: what is raised.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as failure:
        # torch's two allocators: `OutOfMemoryError` on a device, a plain RuntimeError on the host.
        lines = str(failure).strip().splitlines() or [type(failure).__name__]
        words = lines[0].lower()
        is_memory = isinstance(failure, MemoryError) or "out of memory" in words
        if not (is_memory or "can't allocate memory" in words):
            raise
        raise error(f"out of memory for {component}: {lines[0]}", hint=hint) from failure
