"""Modules of one kind, which compute the same of their weights, get another class together.

Knows settings and weights of a module; what the other class does is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import nn

Form = TypeVar("Form")


Make = Callable[[nn.Module], type[nn.Module] | None]


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Modules of equal kinds compute the same of their weights."""
    plain = (bool, int, float, str, type(None))
    settings = [(n, v) for n, v in vars(module).items() if isinstance(v, plain) and n != "training"]
    weight = getattr(module, "weight", None)
    return (type(module), tuple(sorted(settings)), None if weight is None else weight.dtype)


def refit(model: nn.Module, make: Make, *, kind: Callable[[nn.Module], Hashable] = kind_of) -> int:
    """Gives each module the class that is made for its kind.

    Args:
        make: asked once for each kind, with one of its modules; `None` leaves them as they are.
        kind: modules for which it is equal are of one kind.

    Returns:
        How many have another class now.
    """
    # One class for a kind: what a compiler has made for one of its modules serves the others.
    classes: dict[Hashable, type[nn.Module] | None] = {}
    found = 0
    for module in model.modules():
        key = kind(module)
        if key not in classes:
            classes[key] = make(module)
        other = classes[key]
        if other is not None:
            module.__class__ = other
            found += 1
    return found


def by_form(
    find: Callable[[nn.Module], Form | None],
    fused: Callable[[type[nn.Module], Form], type[nn.Module]],
) -> Make:
    """Makes the class of a kind from the form that is found for it.

    Args:
        find: the form of what a module computes, `None` where it has none.
        fused: the class for a stock class and its form.
    """

    def make(module: nn.Module) -> type[nn.Module] | None:
        form = find(module)
        return None if form is None else fused(type(module), form)

    return make
