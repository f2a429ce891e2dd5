"""Whether a stock model's layers can run over our KV pool, and their numbers.

Decided by what the model does, not by its name: it runs twice, on the meta device, and what its
cache is asked for, what its attention function gets and which positions its masks let through is
watched. What cannot be shown is a reason to refuse. Knows transformers' caches, masks and
attention functions; knows nothing of pools.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from hotset.core.geometry import AttentionLayer, Latent, StateLayer
from hotset.models.attention import AttentionSwitch, unknown_arguments
from hotset.models.attention_formula import FORMULA_ARGUMENTS, formula_problem
from hotset.models.attention_watch import (
    DECODE,
    DECODE_CHOSEN,
    PREFILL,
    Attended,
    ProbeCache,
    RefusedError,
    Update,
    probe_expand,
)
from hotset.models.indexer_probe import choice_problem
from hotset.models.indexers import UnknownIndexerError
from hotset.models.latent_probe import expansion_problem
from hotset.models.meta import ValueAskedError, no_values, plain_text
from hotset.models.state_probe import STATE_LAYERS, find_states

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
    except RefusedError as refused:
        return AttentionSupport(reason=str(refused))


def _find(model: PreTrainedModel) -> tuple[tuple[AttentionLayer, ...], tuple[StateLayer, ...]]:
    switch = AttentionSwitch(model)
    cache = ProbeCache(model, makes_mask=bool(switch.choosing))
    own = _check_kinds(model, cache)
    with plain_text(), cache.watch.watching():
        _forward(model, cache, switch, PREFILL, _PREFILL_TOKENS)
    prefill = cache.updates
    try:
        states = find_states(cache, own, cache.watch.paths)
    except ValueError as refused:
        raise RefusedError(str(refused)) from refused
    cache.start()
    try:
        with no_values():
            _forward(model, cache, switch, DECODE_CHOSEN if switch.choosing else DECODE, 1)
    except ValueAskedError as asked:
        raise RefusedError(f"the model asks for values when it decodes (`{asked}`)") from asked
    if cache.asked_length:
        raise RefusedError("the model asks its cache for one length of all rows when it decodes")
    layers: list[AttentionLayer] = []
    windows: dict[int, int | None] = {}
    known: dict[object, str] = {}
    for index in sorted(prefill.keys() | cache.updates.keys()):
        attended = _only_call(index, prefill.get(index, []))
        mask = _only_call(index, cache.updates.get(index, [])).mask
        if mask is not None and not hasattr(mask, "mask_function"):
            raise RefusedError(f"layer {index} makes a mask of its own when it decodes")
        mask = attended.mask
        if mask is None and attended.selection is not None:
            windows[id(mask)] = None
        elif id(mask) not in windows:
            windows[id(mask)] = _window(index, mask)
        layer = _layer(model, index, prefill[index][0], attended, windows[id(mask)])
        layer = replace(layer, indexer=cache.indexers.get(index))
        _check_cached_window(layer, cache)
        _check_choice(layer, attended, known)
        if layer.latent is not None:
            _check_latents(layer, attended, known)
        problem = formula_problem(
            attended.module,
            attended.arguments,
            num_heads=(layer.num_heads, layer.num_kv_heads),
            head_dims=(layer.key_dim, layer.value_dim),
            num_keys=min(layer.window or 7, 7),
        )
        if problem:
            raise RefusedError(f"layer {index} {problem}")
        layers.append(layer)
    if not layers:
        raise RefusedError("no layer keeps keys and values")
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
    expanding = [(module, "expand_kv", probe_expand(module)) for module in switch.expanding]
    try:
        with torch.no_grad(), switch.using(name, [*expanding, *switch.choosing]):
            model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    except UnknownIndexerError as refused:
        raise RefusedError(f"an indexer {refused}") from refused
    except TypeError as error:
        if not switch.choosing:
            raise
        # An operator that what stands for an indexer's keys does not have.
        raise RefusedError(f"an indexer computes with its keys ({error})") from error


def _check_kinds(model: PreTrainedModel, cache: DynamicCache) -> DynamicCache:
    """Only layers that cache one pair of keys and values or a state, in the library's own cache;
    returns that of a forward over one token."""
    ours = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, DummyLayer)
    known = (*ours, *STATE_LAYERS)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in known:
            raise RefusedError(
                f"layer {index} caches more than keys, values and a state ({layer!r})"
            )
    device = next(model.parameters()).device
    ids = torch.zeros((1, 1), dtype=torch.int64, device=device)
    with torch.no_grad(), plain_text():
        own = model(input_ids=ids, use_cache=True).past_key_values
    if type(own) is not DynamicCache:
        raise RefusedError(f"the model makes a cache of its own kind, `{type(own).__name__}`")
    return own


def _only_call(index: int, updates: list[Update]) -> Attended:
    """The one attention call that got, untouched, what the one update of a layer returned."""
    if len(updates) != 1:
        raise RefusedError(f"layer {index} updates its cache {len(updates)} times in a forward")
    (update,) = updates
    # How many keys there are is asked for a mask of what is chosen, which nobody makes.
    chosen = any(attended.selection is not None for attended in update.attended)
    touched_by = update.touched_by - {"shape"} if chosen else update.touched_by
    if touched_by:
        names = ", ".join(f"`{name}`" for name in sorted(touched_by))
        raise RefusedError(
            f"layer {index} computes with what it caches before it attends ({names})"
        )
    if len(update.attended) != 1:
        times = len(update.attended)
        raise RefusedError(f"what layer {index} caches is attended to {times} times in a forward")
    (attended,) = update.attended
    unknown = set(unknown_arguments(attended.arguments)) - FORMULA_ARGUMENTS
    if unknown:
        names = ", ".join(f"`{name}`" for name in sorted(unknown))
        raise RefusedError(f"layer {index} passes {names} to its attention function")
    return attended


def _layer(
    model: nn.Module, index: int, update: Update, attended: Attended, window: int | None
) -> AttentionLayer:
    num_heads = attended.num_heads
    keys, values = update.expanded or (update.key_shape, update.value_shape)
    num_kv_heads, key_dim = keys[1], keys[3]
    if values[:3] != keys[:3] or num_heads % num_kv_heads:
        shapes = f"{num_heads} heads, {tuple(keys)}, {tuple(values)}"
        raise RefusedError(f"layer {index} has heads that do not divide evenly ({shapes})")
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


def _latent(index: int, update: Update, window: int | None) -> Latent:
    """What a layer keeps that expands it; as far as shapes tell."""
    if update.key_shape[1] != 1 or update.value_shape[1] != 1:
        raise RefusedError(f"layer {index} keeps latents for each head")
    if window is not None:
        raise RefusedError(f"layer {index} keeps latents and attends to a window of them")
    return Latent(rank=update.key_shape[3], rope_dim=update.value_shape[3])


def _check_choice(layer: AttentionLayer, attended: Attended, known: dict[object, str]) -> None:
    """What is chosen is attended to, and nothing else is chosen than ours would.

    Args:
        known: as for `_check_latents`.
    """
    if attended.selection is None:
        if layer.indexer is not None:
            raise RefusedError(f"layer {layer.index} chooses, and attends to everything")
        return
    if layer.latent is None:
        raise RefusedError(f"layer {layer.index} chooses among keys of several heads")
    if layer.indexer is not None:
        module = attended.module.indexer
        kind = (repr(module), layer.indexer)
        if kind not in known:
            known[kind] = choice_problem(module)
        if known[kind]:
            raise RefusedError(f"layer {layer.index} {known[kind]}")


def _check_latents(layer: AttentionLayer, attended: Attended, known: dict[object, str]) -> None:
    """The layer expands as ours do, and its scores have no cap.

    Args:
        known: problems by kind of layer: a matrix of full size is looked at once.
    """
    if attended.arguments.get("softcap") is not None:
        raise RefusedError(f"layer {layer.index} keeps latents and caps its scores")
    kind = (repr(attended.module), replace(layer, path="", index=0))
    if kind not in known:
        known[kind] = expansion_problem(attended.module, layer)
    if known[kind]:
        raise RefusedError(f"layer {layer.index} {known[kind]}")


def _window(index: int, mask: torch.Tensor | None) -> int | None:
    """The window that a mask amounts to: its function is asked about every position.

    A causal mask lets everything up to the query through, a window its last positions.
    """
    allows: MaskFunction | None = getattr(mask, "mask_function", None)
    if allows is None:
        raise RefusedError(f"layer {index} changes its mask, or has none")
    seen = int(_row(allows, _FAR_POSITION).sum())
    window = None if seen == _FAR_POSITION + 1 else seen
    for q in (0, 1, *(range(max(0, seen - 2), seen + 2) if window else ()), _FAR_POSITION):
        key = torch.arange(q + 3)
        expected = (key <= q) & (key > q - seen)
        if not torch.equal(_row(allows, q), expected):
            raise RefusedError(f"layer {index} has a mask that is neither causal nor a window")
    return window


def _row(allows: MaskFunction, query: int) -> torch.Tensor:
    """Which of the keys 0 .. query + 2 a query sees, bool [query + 3]."""
    zero = torch.zeros((), dtype=torch.int64)
    allowed = allows(zero, zero, torch.tensor(query), torch.arange(query + 3))
    return allowed.expand(query + 3)


def _check_cached_window(layer: AttentionLayer, cache: DynamicCache) -> None:
    kept = getattr(cache.layers[layer.index], "sliding_window", None)
    if kept != layer.window:
        raise RefusedError(
            f"layer {layer.index} caches a window of {kept}, its mask shows {layer.window}"
        )
