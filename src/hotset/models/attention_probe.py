"""Whether a stock model's layers can run over our KV pool, and their numbers.

Decided by what the model does, not by its name: it runs twice, on the meta device, and what its
cache is asked for, what its attention function gets and which positions its masks let through is
watched. What cannot be shown is a reason to refuse. Knows transformers' caches, masks and
attention functions; knows nothing of pools.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from hotset.core.geometry import AttentionLayer, Latent, StateLayer
from hotset.models.attention import AttentionSwitch, Expand, unknown_arguments
from hotset.models.attention_formula import FORMULA_ARGUMENTS, formula_problem
from hotset.models.latent_probe import expansion_problem
from hotset.models.meta import ValueAskedError, no_values, plain_text
from hotset.models.state_probe import STATE_LAYERS, LayerWatch, find_states

_PREFILL, _DECODE = "hotset_probe_prefill", "hotset_probe_decode"
_PREFILL_TOKENS = 5
# A mask is looked at from this position: windows are shorter.
_FAR_POSITION = 1 << 20

# (batch, head, query position, key position) -> bool, all of them index tensors
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class AttentionSupport:
    """What was found.

    Attributes:
        layers: all layers that keep keys and values, in ascending index; empty if refused.
        states: all layers that carry a state, likewise.
        reason: why not, as a clause; empty if supported.
    """

    layers: tuple[AttentionLayer, ...] = ()
    states: tuple[StateLayer, ...] = ()
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason


def find_attention(model: PreTrainedModel) -> AttentionSupport:
    """Runs a model and says whether every layer is full or sliding-window attention as we do it,
    or carries a state of fixed size.

    Args:
        model: on any device, best the meta device; its experts are stock ones or bound.
    """
    try:
        layers, states = _find(model)
        return AttentionSupport(layers=layers, states=states)
    except _RefusedError as refused:
        return AttentionSupport(reason=str(refused))


class _RefusedError(Exception):
    """The reason."""


@dataclass
class _Attended:
    """One call of an attention function with what a cache returned."""

    module: nn.Module
    num_heads: int
    mask: torch.Tensor | None
    arguments: dict[str, Any]


@dataclass
class _Update:
    """One call of a cache's `update`, and what became of the two tensors that it returned.

    Attributes:
        expanded: shapes of the keys and values that a module's `expand_kv` made of them; these
            count as them from then on.
    """

    key_shape: torch.Size
    value_shape: torch.Size
    expanded: tuple[torch.Size, torch.Size] | None = None
    touched_by: set[str] = field(default_factory=set)
    attended: list[_Attended] = field(default_factory=list)


class _Watched(torch.Tensor):
    """A tensor that remembers every operation on it, asking for its shape included."""

    update: _Update

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, cls):
                value.update.touched_by.add(getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def of(cls, tensor: torch.Tensor, update: _Update) -> _Watched:
        watched = tensor.as_subclass(cls)
        watched.update = update
        return watched


class _ProbeCache(DynamicCache):
    """The library's cache, watched; `updates` and `asked_length` are of the current forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        self.watch = LayerWatch(model)
        self.start()

    def start(self) -> None:
        self.updates: dict[int, list[_Update]] = {}
        self.asked_length = False

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *a: Any,
        **k: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        update = _Update(key_states.shape, value_states.shape)
        self.updates.setdefault(layer_idx, []).append(update)
        keys, values = super().update(key_states, value_states, layer_idx, *a, **k)
        return _Watched.of(keys, update), _Watched.of(values, update)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *a: Any, **k: Any
    ) -> torch.Tensor:
        self.watch.asked(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *a, **k)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *a: Any, **k: Any
    ) -> torch.Tensor:
        self.watch.asked(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *a, **k)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.asked_length = True
        return int(super().get_seq_length(layer_idx))


def _probe_attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    if isinstance(key, _Watched) and isinstance(value, _Watched) and key.update is value.update:
        seen = _Attended(module, query.shape[1], attention_mask, arguments)
        key.update.attended.append(seen)
    with torch._C.DisableTorchFunctionSubclass():
        batch, num_heads, num_tokens = query.shape[:3]
        return query.new_zeros(batch, num_tokens, num_heads, value.shape[-1]), None


def _probe_expand(module: nn.Module) -> Expand:
    """The module's own `expand_kv`, watched."""
    stock: Expand = type(module).expand_kv.__get__(module)  # type: ignore[attr-defined]

    def expand(latents: Any, rope: Any) -> tuple[Any, Any]:
        both = (latents, rope)
        update = next((x.update for x in both if isinstance(x, _Watched)), None)
        if update is None or not all(isinstance(x, _Watched) and x.update is update for x in both):
            return stock(latents, rope)
        with torch._C.DisableTorchFunctionSubclass():
            keys, values = stock(*(x.as_subclass(torch.Tensor) for x in both))
        update.expanded = keys.shape, values.shape
        return _Watched.of(keys, update), _Watched.of(values, update)

    return expand


def _probe_mask(**arguments: Any) -> torch.Tensor:
    """A mask of the right shape that remembers which positions it is meant to let through."""
    shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
    mask = torch.zeros(shape, dtype=torch.bool, device=arguments["device"])
    mask.mask_function = arguments["mask_function"]  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(_PREFILL, _probe_attend)
AttentionInterface.register(_DECODE, _probe_attend)
AttentionMaskInterface.register(_PREFILL, _probe_mask)


def _find(model: PreTrainedModel) -> tuple[tuple[AttentionLayer, ...], tuple[StateLayer, ...]]:
    switch, cache = AttentionSwitch(model), _ProbeCache(model)
    own = _check_kinds(model, cache)
    with plain_text(), cache.watch.watching():
        _forward(model, cache, switch, _PREFILL, _PREFILL_TOKENS)
    prefill = cache.updates
    try:
        states = find_states(cache, own, cache.watch.paths)
    except ValueError as refused:
        raise _RefusedError(str(refused)) from refused
    cache.start()
    try:
        with no_values():
            _forward(model, cache, switch, _DECODE, 1)
    except ValueAskedError as asked:
        raise _RefusedError(f"the model asks for values when it decodes (`{asked}`)") from asked
    if cache.asked_length:
        raise _RefusedError("the model asks its cache for one length of all rows when it decodes")
    layers, windows = [], {}
    expansions: dict[object, str] = {}
    for index in sorted(prefill.keys() | cache.updates.keys()):
        attended = _only_call(index, prefill.get(index, []))
        if _only_call(index, cache.updates.get(index, [])).mask is not None:
            raise _RefusedError(f"layer {index} makes a mask of its own when it decodes")
        mask = attended.mask
        if id(mask) not in windows:
            windows[id(mask)] = _window(index, mask)
        layer = _layer(model, index, prefill[index][0], attended, windows[id(mask)])
        _check_cached_window(layer, cache)
        if layer.latent is not None:
            _check_latents(layer, attended, expansions)
        problem = formula_problem(
            attended.module,
            attended.arguments,
            num_heads=(layer.num_heads, layer.num_kv_heads),
            head_dims=(layer.key_dim, layer.value_dim),
            num_keys=min(layer.window or 7, 7),
        )
        if problem:
            raise _RefusedError(f"layer {index} {problem}")
        layers.append(layer)
    if not layers:
        raise _RefusedError("no layer keeps keys and values")
    return tuple(layers), states


def _forward(
    model: PreTrainedModel,
    cache: DynamicCache,
    switch: AttentionSwitch,
    name: str,
    num_tokens: int,
) -> None:
    device = next(model.parameters()).device
    ids = torch.zeros((1, num_tokens), dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device)[None]
    with torch.no_grad(), switch.using(name, _probe_expand):
        model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)


def _check_kinds(model: PreTrainedModel, cache: DynamicCache) -> DynamicCache:
    """Only layers that cache one pair of keys and values or a state, in the library's own cache;
    returns that of a forward over one token."""
    known = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer, *STATE_LAYERS)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in known:
            raise _RefusedError(
                f"layer {index} caches more than keys, values and a state ({layer!r})"
            )
    device = next(model.parameters()).device
    ids = torch.zeros((1, 1), dtype=torch.int64, device=device)
    with torch.no_grad(), plain_text():
        own = model(input_ids=ids, use_cache=True).past_key_values
    if type(own) is not DynamicCache:
        raise _RefusedError(f"the model makes a cache of its own kind, `{type(own).__name__}`")
    return own


def _only_call(index: int, updates: list[_Update]) -> _Attended:
    """The one attention call that got, untouched, what the one update of a layer returned."""
    if len(updates) != 1:
        raise _RefusedError(f"layer {index} updates its cache {len(updates)} times in a forward")
    (update,) = updates
    if update.touched_by:
        names = ", ".join(f"`{name}`" for name in sorted(update.touched_by))
        raise _RefusedError(
            f"layer {index} computes with what it caches before it attends ({names})"
        )
    if len(update.attended) != 1:
        times = len(update.attended)
        raise _RefusedError(f"what layer {index} caches is attended to {times} times in a forward")
    (attended,) = update.attended
    unknown = set(unknown_arguments(attended.arguments)) - FORMULA_ARGUMENTS
    if unknown:
        names = ", ".join(f"`{name}`" for name in sorted(unknown))
        raise _RefusedError(f"layer {index} passes {names} to its attention function")
    return attended


def _layer(
    model: nn.Module, index: int, update: _Update, attended: _Attended, window: int | None
) -> AttentionLayer:
    num_heads = attended.num_heads
    keys, values = update.expanded or (update.key_shape, update.value_shape)
    num_kv_heads, key_dim = keys[1], keys[3]
    if values[:3] != keys[:3] or num_heads % num_kv_heads:
        shapes = f"{num_heads} heads, {tuple(keys)}, {tuple(values)}"
        raise _RefusedError(f"layer {index} has heads that do not divide evenly ({shapes})")
    path = next(name for name, module in model.named_modules() if module is attended.module)
    return AttentionLayer(
        path=path,
        index=index,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=values[3],
        window=window,
        latent=_latent(index, update, window) if update.expanded else None,
    )


def _latent(index: int, update: _Update, window: int | None) -> Latent:
    """What a layer keeps that expands it; as far as shapes tell."""
    if update.key_shape[1] != 1 or update.value_shape[1] != 1:
        raise _RefusedError(f"layer {index} keeps latents for each head")
    if window is not None:
        raise _RefusedError(f"layer {index} keeps latents and attends to a window of them")
    return Latent(rank=update.key_shape[3], rope_dim=update.value_shape[3])


def _check_latents(layer: AttentionLayer, attended: _Attended, known: dict[object, str]) -> None:
    """The layer expands as ours do, and its function takes no more than scores.

    Args:
        known: problems by kind of layer: a matrix of full size is looked at once.
    """
    extra = FORMULA_ARGUMENTS - {"scaling"}
    if any(attended.arguments.get(name) is not None for name in extra):
        raise _RefusedError(f"layer {layer.index} keeps latents and has sinks or a cap")
    kind = (repr(attended.module), replace(layer, path="", index=0))
    if kind not in known:
        known[kind] = expansion_problem(attended.module, layer)
    if known[kind]:
        raise _RefusedError(f"layer {layer.index} {known[kind]}")


def _window(index: int, mask: torch.Tensor | None) -> int | None:
    """The window that a mask amounts to: its function is asked about every position.

    A causal mask lets everything up to the query through, a window its last positions.
    """
    allows: MaskFunction | None = getattr(mask, "mask_function", None)
    if allows is None:
        raise _RefusedError(f"layer {index} changes its mask, or has none")
    seen = int(_row(allows, _FAR_POSITION).sum())
    window = None if seen == _FAR_POSITION + 1 else seen
    for q in (0, 1, *(range(max(0, seen - 2), seen + 2) if window else ()), _FAR_POSITION):
        key = torch.arange(q + 3)
        expected = (key <= q) & (key > q - seen)
        if not torch.equal(_row(allows, q), expected):
            raise _RefusedError(f"layer {index} has a mask that is neither causal nor a window")
    return window


def _row(allows: MaskFunction, query: int) -> torch.Tensor:
    """Which of the keys 0 .. query + 2 a query sees, bool [query + 3]."""
    zero = torch.zeros((), dtype=torch.int64)
    allowed = allows(zero, zero, torch.tensor(query), torch.arange(query + 3))
    return allowed.expand(query + 3)


def _check_cached_window(layer: AttentionLayer, cache: DynamicCache) -> None:
    kept = getattr(cache.layers[layer.index], "sliding_window", None)
    if kept != layer.window:
        raise _RefusedError(
            f"layer {layer.index} caches a window of {kept}, its mask shows {layer.window}"
        )
