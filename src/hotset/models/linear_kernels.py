"""Packages with kernels for recurrences and convolutions: which a stock model uses, which it lacks.

transformers' modules use such a package where it is installed (`fla`, `causal_conv1d`, `mamba_ssm`)
and plain torch otherwise, function by function. Which of the two they chose when they were imported
is asked of the functions themselves. Its kernels are for GPUs, and are launched wherever the
tensors lie: off a GPU, plain torch has to run instead. Knows those functions; installs nothing.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.integrations import hub_kernels


def missing_packages(model: PreTrainedModel) -> tuple[str, ...]:
    """Distributions, by the names they are installed by, in whose place the model runs plain torch;
    sorted. Empty where it needs none or has all."""
    return _packages(model, used=False)


def used_packages(model: PreTrainedModel) -> tuple[str, ...]:
    """Distributions whose kernels the model runs, likewise."""
    return _packages(model, used=True)


# What the library's decorated functions ask whether they are being exported.
_EXPORTING = "is_torchdynamo_exporting"
# Two blocks that overlapped would put each other's function back.
_SWAPPING = threading.RLock()


@contextmanager
def plain_torch() -> Iterator[None]:
    """Within the block, what this thread runs is plain torch, whatever is installed.

    The library does so itself while it exports a model, and is told that it does.
    """
    with _SWAPPING:
        stock: Callable[[], bool] = getattr(hub_kernels, _EXPORTING)
        thread = threading.get_ident()
        setattr(hub_kernels, _EXPORTING, lambda: threading.get_ident() == thread or stock())
        try:
            yield
        finally:
            setattr(hub_kernels, _EXPORTING, stock)


def keep_to_plain_torch(model: PreTrainedModel) -> None:
    """Lets a model that is not on a GPU run without the kernels of packages."""
    if used_packages(model):
        model.forward = plain_torch()(model.forward)


def _packages(model: PreTrainedModel, *, used: bool) -> tuple[str, ...]:
    names: dict[str, str] = hub_kernels._PACKAGE_TO_DISTRIBUTION
    modules = {type(module).__module__ for module in model.modules()}
    found = {
        choice["package"]
        for name in modules
        for choice in _choices(vars(sys.modules[name]).values())
        if choice["is_new_implementation"] == used
    }
    return tuple(sorted(names.get(package, package) for package in found))


def _choices(values: Any) -> Iterator[dict[str, Any]]:
    """What the library's decorator has noted of each function that it has chosen for."""
    for value in list(values):
        if inspect.isfunction(value) and value.__closure__:
            noted = dict(inspect.getclosurevars(value).nonlocals)
            if {"package", "is_new_implementation"} <= noted.keys():
                yield noted
