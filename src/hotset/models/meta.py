"""Stock code on the meta device, where no tensor has values: what is assumed of them.

Shapes there are exact and cost nothing. Where code asks for a value, the answer is that of one
plain text: every mask bit that is asked for is set, every check of the input holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental import _config as fx_config
from torch.overrides import TorchFunctionMode


@contextmanager
def plain_text() -> Iterator[None]:
    """Within the block, meta tensors answer as they would for one plain text."""
    # Where a model asks for the positions of set mask bits, all are taken as set.
    all_set = fx_config.patch(  # type: ignore[attr-defined]  # added to the module at run time
        meta_nonzero_assume_all_nonzero=True
    )
    with all_set, _Yes():
        yield


@contextmanager
def no_values() -> Iterator[None]:
    """Within the block, code that asks for a value of a meta tensor is found out.

    Raises:
        ValueAskedError: from the block. On a device the code would wait there, and a captured
            graph would go on with the answer of its capture.
    """
    with _Asked():
        yield


class ValueAskedError(Exception):
    """How it was asked."""


class _Asked(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ASKS and args[0].is_meta:
            raise ValueAskedError(func.__name__)
        return func(*args, **(kwargs or {}))


_ASKS = (
    *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__),
    *(torch.Tensor.__index__, torch.Tensor.item, torch.Tensor.tolist),
)


class _Yes(TorchFunctionMode):
    """Takes every branch on a meta tensor (are these positions one sequence?) as true."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))
