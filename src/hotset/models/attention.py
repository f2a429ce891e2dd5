"""The seam into transformers' attention: one name, `hotset`, for all that runs over a KV pool.

While a model's configs say `hotset`, its attention modules call `_attend`, and no mask is built,
since the name has none in the library's mask interface. The cache is found in the keys: what a
cache's `update` returns is what the library hands to the attention function, the same object
(`attention_probe` makes sure), so our cache returns a `KVView` in their place. Where the library
would expand latents to keys and values on the way (`expand_kv`), the view passes through. Nothing
is bound to modules for longer than a forward, and nothing is global.

A model whose indexers choose what is attended to runs as `hotset_chosen`: it asks for a mask that
it can slice, and hands on what was chosen (`indexers`).

A compiler that meets the cache or `_attend` breaks its graph there and runs them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from hotset.models import indexers
from hotset.models.indexers import Selection

IMPLEMENTATION, CHOSEN = "hotset", "hotset_chosen"

# What a model may pass to its attention function and ours need not know: the mask and the cache
# carry positions and windows, and there is no dropout when a model only runs.
IGNORED_ARGUMENTS = frozenset(
    {
        "dropout",
        "position_ids",
        "sliding_window",
        "use_cache",
        "output_attentions",
        "output_router_logits",
        "logits_to_keep",  # from a model whose head does not know it
    }
)


def unknown_arguments(arguments: Mapping[str, object]) -> list[str]:
    """Names of arguments of an attention function that would change the result, and are set."""
    return [n for n, v in arguments.items() if v is not None and n not in IGNORED_ARGUMENTS]


class KVView(Protocol):
    """One layer's part of a KV pool during one step.

    Attributes:
        keeps_latents: it has latents in the place of keys and values.
    """

    keeps_latents: bool

    def attend(
        self,
        q_BQTD: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks_Q: torch.Tensor | None,
    ) -> torch.Tensor:
        """[B, T, Hq, Dv]: the newest T tokens of each row attend to themselves and to all that is
        cached of it before them."""

    def attend_latents(
        self,
        q_BQTD: torch.Tensor,
        weight: torch.Tensor,
        *,
        scale: float,
        sinks_Q: torch.Tensor | None,
        selection: Selection | None,
    ) -> torch.Tensor:
        """The same where latents are cached, which `weight` [Hq * (N + Dv), R] expands to the
        first N columns of keys and to values; of what was chosen, if anything was."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(  # noqa: PLR0913 - the library's
    module: nn.Module,
    query: torch.Tensor,
    key: object,
    value: object,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    selection: Selection | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """What the library calls in every attention layer whose implementation is `hotset`.

    Args:
        query: [B, Hq, T, Dk].
        key, value: the `KVView` that the cache's `update` returned, twice.
        s_aux: attention sinks, [Hq].

    Returns:
        [B, T, Hq, Dv], and no attention weights.
    """
    assert attention_mask is None and key is value
    assert not unknown_arguments(others), unknown_arguments(others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    view = cast(KVView, key)
    if view.keeps_latents:
        assert softcap is None
        weight = cast(torch.Tensor, cast(nn.Module, module.kv_b_proj).weight)
        out = view.attend_latents(query, weight, scale=scale, sinks_Q=s_aux, selection=selection)
        return out, None
    assert selection is None
    return view.attend(query, scale=scale, softcap=softcap, sinks_Q=s_aux), None


def _attend_chosen(
    module: nn.Module,
    query: torch.Tensor,
    key: object,
    value: object,
    attention_mask: object = None,
    *,
    indices: Selection | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """`_attend` of a model with indexers, which passes what was chosen as indices or as a mask."""
    others["selection"] = selection_of(attention_mask, indices)
    out: tuple[torch.Tensor, None] = _attend(module, query, key, value, **others)
    return out


def selection_of(attention_mask: object, indices: object) -> Selection | None:
    """What was chosen, among the arguments of an attention function."""
    return next((x for x in (indices, attention_mask) if isinstance(x, Selection)), None)


def _no_mask(**arguments: Any) -> torch.Tensor:
    """A mask of the right kind with nothing in it, for indexers that slice one."""
    shape = (arguments["batch_size"], 1, arguments["q_length"], 1)
    return torch.zeros(1, dtype=torch.bool, device=arguments["device"]).expand(shape)


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionInterface.register(CHOSEN, _attend_chosen)
AttentionMaskInterface.register(CHOSEN, _no_mask)

# (first, second tensor that a cache's `update` returned) -> keys, values
Expand = Callable[[Any, Any], tuple[Any, Any]]


def _pass_through(latents: Any, rope: Any) -> tuple[Any, Any]:
    """In the place of `expand_kv`. One function for all layers, which share compiled code."""
    return latents, rope


class AttentionSwitch:
    """Chooses the attention implementation of a whole model, per forward.

    A model reads its config's `_attn_implementation` each time it needs a mask or an attention
    function, so setting that attribute is all it takes. The library's `set_attn_implementation`
    walks the module tree and checks again what was checked at the start: a thousand times slower.

    Args:
        model: a stock model.
    """

    def __init__(self, model: nn.Module) -> None:
        configs = (getattr(module, "config", None) for module in model.modules())
        distinct = {id(c): c for c in configs if isinstance(c, PretrainedConfig)}
        self._configs = list(distinct.values())
        self.expanding = [module for module in model.modules() if hasattr(module, "expand_kv")]
        self.choosing = indexers.replacements(model)
        expanding = [(module, "expand_kv", _pass_through) for module in self.expanding]
        self._replaced = [*expanding, *self.choosing]

    @contextmanager
    def using(
        self, name: str, replaced: Sequence[tuple[nn.Module, str, Any]] = ()
    ) -> Iterator[None]:
        """Within the block all attention layers use the implementation `name`; behind it what they
        used before, which in a block within a block is the outer one's.

        Args:
            replaced: (module, attribute, what it is within the block).
        """
        before = [config._attn_implementation for config in self._configs]
        own = [vars(module).get(attribute) for module, attribute, _ in replaced]
        for config in self._configs:
            config._attn_implementation_internal = name
        for module, attribute, other in replaced:
            vars(module)[attribute] = other
        try:
            yield
        finally:
            for config, earlier in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = earlier
            for (module, attribute, _), outer in zip(replaced, own, strict=True):
                if outer is not None:
                    vars(module)[attribute] = outer
                else:
                    vars(module).pop(attribute, None)  # the class's own shows again

    def decode(self) -> AbstractContextManager[None]:
        """Within the block: attention over a KV pool, without masks."""
        return self.using(CHOSEN if self.choosing else IMPLEMENTATION, self._replaced)


@contextmanager
def shared_compilation(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """Within the block, compiled code of one attention module serves all of its kind.

    A module tells the cache which layer it is by an integer, `layer_idx`. A compiler takes an
    integer for a constant and would compile each layer anew; an object that the cache can index
    with is passed through unread.

    Args:
        model: a stock model.
        paths: its attention modules (`AttentionLayer.path`).
    """
    modules: list[Any] = [model.get_submodule(path) for path in paths]
    indices = [module.layer_idx for module in modules]
    for module, index in zip(modules, indices, strict=True):
        module.layer_idx = _LayerIndex(index)
    try:
        yield
    finally:
        for module, index in zip(modules, indices, strict=True):
            module.layer_idx = index


class _LayerIndex:
    """Indexes a list, and can nothing else."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __index__(self) -> int:
        return self._index
