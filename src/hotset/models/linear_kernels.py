"""Which packages with kernels for recurrences and convolutions a stock model would use and lacks.

transformers' modules use such a package where it is installed (`fla`, `causal_conv1d`, `mamba_ssm`)
and plain torch otherwise, function by function. Which of the two they chose when they were imported
is asked of the functions themselves. Knows those functions; installs and chooses nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel
from transformers.integrations import hub_kernels


def missing_packages(model: PreTrainedModel) -> tuple[str, ...]:
    """Distributions, by the names they are installed by, in whose place the model runs plain torch;
    sorted. Empty where it needs none or has all."""
    names: dict[str, str] = hub_kernels._PACKAGE_TO_DISTRIBUTION
    modules = {type(module).__module__ for module in model.modules()}
    missing = {
        choice["package"]
        for name in modules
        for choice in _choices(vars(sys.modules[name]).values())
        if not choice["is_new_implementation"]
    }
    return tuple(sorted(names.get(package, package) for package in missing))


def _choices(values: Any) -> Iterator[dict[str, Any]]:
    """What the library's decorator has noted of each function that it has chosen for."""
    for value in list(values):
        if inspect.isfunction(value) and value.__closure__:
            noted = dict(inspect.getclosurevars(value).nonlocals)
            if {"package", "is_new_implementation"} <= noted.keys():
                yield noted
