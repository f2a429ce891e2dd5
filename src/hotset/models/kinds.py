"""Modules of one kind, which compute the same of their weights, get another class together.

Knows settings and weights of a module; what the other class does is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def refit(model: nn.Module, make: Callable[[nn.Module], type[nn.Module] | None]) -> int:
    """Gives each module the class that is made for its kind.

    Args:
        make: asked once for each kind, with one of its modules; `None` leaves them as they are.

    Returns:
        How many have another class now.
    """
    # One class for a kind: what a compiler has made for one of its modules serves the others.
    classes: dict[tuple[Any, ...], type[nn.Module] | None] = {}
    found = 0
    for module in model.modules():
        kind = kind_of(module)
        if kind not in classes:
            classes[kind] = make(module)
        other = classes[kind]
        if other is not None:
            module.__class__ = other
            found += 1
    return found


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Modules of equal kinds compute the same of their weights."""
    plain = (bool, int, float, str, type(None))
    settings = [(n, v) for n, v in vars(module).items() if isinstance(v, plain) and n != "training"]
    weight = getattr(module, "weight", None)
    return (type(module), tuple(sorted(settings)), None if weight is None else weight.dtype)
