"""Attention modules whose rotary embedding runs in one launch a tensor (`kernels/rotary`).

Stock code takes five passes over queries and as many over keys. Which function of a modeling file
computes such an embedding, and in which form, is asked of the function, so that none is listed.
The module gets a class of its own whose `forward` is the stock code with another function in that
place: neither the library's module nor other models see it. Where a compiler looks, it sees the
stock function. Knows attention modules; nothing of where they stand in a model.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hotset.kernels.rotary import Pairs, RotaryForm, accepts, reference, rotate
from hotset.models.kinds import refit

# What such functions call their tensors, before anything that may be left out.
_TENSORS = (("q", "k"), ("x",))
_ANGLES = ("cos", "sin")
_HEADS_AT = "unsqueeze_dim"

# [B, heads, T, D] of what a function is asked with.
_PROBE_SHAPE = (1, 2, 3, 16)


@dataclass(frozen=True)
class _Case:
    """What a function's form may depend on.

    Attributes:
        is_same: angles are of the dtype of what they turn; otherwise they are FP32, and that half.
        is_whole: they have as many columns as a head has elements.
    """

    is_same: bool
    is_whole: bool


Forms = dict[_Case, RotaryForm]


def fuse_rotary(model: nn.Module) -> int:
    """Gives each attention module of a model on a GPU its fused rotary embedding.

    Args:
        model: a stock model.

    Returns:
        How many modules there are.
    """
    # Of a class all: the form is of the function that it calls, and not of a module's settings.
    return refit(model, lambda module: _fused_class(type(module)), kind=type)


def find_forms(function: Any) -> Forms:
    """The forms in which a function computes rotary embeddings, shown with random numbers; empty
    where no form gives its bits."""
    names = _tensor_names(function)
    if names is None:
        return {}
    found = {}
    for case in itertools.starmap(_Case, itertools.product((True, False), repeat=2)):
        form = _form(function, len(names), case)
        if form is not None:
            found[case] = form
    return found


def _tensor_names(function: Any) -> tuple[str, ...] | None:
    """What a function calls the tensors that it turns; `None` where it is no such function."""
    if not inspect.isfunction(function):
        return None
    parameters = inspect.signature(function).parameters
    found = tuple(parameters)
    for names in _TENSORS:
        first, rest = found[: len(names) + 2], found[len(names) + 2 :]
        left_out = all(parameters[name].default is not inspect.Parameter.empty for name in rest)
        if first == names + _ANGLES and _HEADS_AT in rest and left_out:
            return names
    return None


def _form(function: Callable[..., Any], num_tensors: int, case: _Case) -> RotaryForm | None:
    source = torch.Generator().manual_seed(0)
    batch, _, num_tokens, dim = _PROBE_SHAPE
    columns = dim if case.is_whole else dim // 2
    dtype = torch.bfloat16 if case.is_same else torch.float32
    tensors = [torch.randn(_PROBE_SHAPE, generator=source).bfloat16() for _ in range(num_tensors)]
    # No angle has these: what a function takes to be equal shows.
    angles = [torch.randn(batch, num_tokens, columns, generator=source).to(dtype) for _ in _ANGLES]
    try:
        out = function(*tensors, *angles)
    except RuntimeError:  # columns of another number are what it takes
        return None
    want = [out] if num_tensors == 1 else out
    cos, sin = (angle[:, None] for angle in angles)
    for form in _candidates():
        if form.rotary_dim(columns) > dim or not (case.is_same or form.wide):
            continue
        got = [reference(x, cos, sin, form) for x in tensors]
        if all(_equal(one, other) for one, other in zip(got, want, strict=True)):
            return form
    return None


def _candidates() -> Iterator[RotaryForm]:
    pairs: tuple[Pairs, ...] = ("halves", "neighbours")
    for source, target, wide in itertools.product(pairs, pairs, (False, True)):
        for angles in ("halves", "neighbours", "first", "single"):
            yield RotaryForm(source, target, angles, wide)


def _equal(got: torch.Tensor, want: Any) -> bool:
    if not isinstance(want, torch.Tensor) or want.dtype != got.dtype:
        return False
    return torch.equal(got, want)


def _fused_class(stock: type[nn.Module]) -> type[nn.Module] | None:
    """A class whose `forward` calls fused functions; `None` where the stock one calls none."""
    forward = stock.forward
    if not inspect.isfunction(forward) or hasattr(forward, "__wrapped__"):
        return None
    fused = {}
    for name in forward.__code__.co_names:
        function: Any = forward.__globals__.get(name)
        forms = find_forms(function)
        if forms:
            fused[name] = _fused(function, forms)
    if not fused:
        return None
    return type(f"Fused{stock.__name__}", (stock,), {"forward": _with_globals(forward, fused)})


def _with_globals(function: FunctionType, changed: dict[str, Any]) -> FunctionType:
    """The function over again, for which some global names mean something else."""
    names = {**function.__globals__, **changed}
    # A compiler would look in the module of this name for what its functions mean.
    del names["__name__"]
    # Code of its own: compilers keep what they have made by it.
    code = function.__code__.replace(co_name=function.__name__)
    again = FunctionType(
        code, names, function.__name__, function.__defaults__, function.__closure__
    )
    again.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(again, function)
    return again


def _fused(function: Callable[..., Any], forms: Forms) -> Callable[..., Any]:
    """The function, with arguments that a form accepts in one launch a tensor."""
    names, signature = _tensor_names(function), inspect.signature(function)
    assert names is not None
    own_heads_at = signature.parameters[_HEADS_AT].default

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not kwargs and len(args) == len(names) + len(_ANGLES):
            *tensors, cos, sin = args
            heads_at = own_heads_at
        else:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            tensors = [given.arguments[name] for name in names]
            cos, sin = (given.arguments[name] for name in _ANGLES)
            heads_at = given.arguments[_HEADS_AT]
        form = _form_of(tensors, cos, forms)
        if form is None or not all(accepts(x, cos, sin, form, heads_at=heads_at) for x in tensors):
            return function(*args, **kwargs)
        turned = [rotate(x, cos, sin, form, heads_at=heads_at) for x in tensors]
        return turned[0] if len(names) == 1 else tuple(turned)

    return fused


def _form_of(tensors: list[Any], cos: Any, forms: Forms) -> RotaryForm | None:
    """The form that was shown for such arguments."""
    if not all(isinstance(x, torch.Tensor) for x in (*tensors, cos)):
        return None
    dim, dtype = tensors[0].shape[-1], tensors[0].dtype
    alike = all(x.shape[-1] == dim and x.dtype == dtype for x in tensors)
    same, columns = cos.dtype == dtype, cos.shape[-1]
    half_in_wide = dtype.itemsize == 2 and cos.dtype == torch.float32
    if not alike or not (same or half_in_wide):
        return None
    form = forms.get(_Case(same, columns == dim))
    whole_head = form is not None and form.angles == "single" and 2 * columns != dim
    return None if whole_head else form
