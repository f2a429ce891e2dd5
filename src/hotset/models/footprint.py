"""What a forward pass allocates, found by running the stock model on the meta device.

Shapes on the meta device are exact and cost nothing, so the KV cache of any architecture (MLA
latents, sliding windows, recurrent states, indexers) and its activations are measured here and
not described a second time. Attention through `scaled_dot_product_attention` counts as a fused
kernel: its inputs and output, no scores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
)

from hotset.models.layer_kinds import LayerKinds
from hotset.models.meta import plain_text
from hotset.models.seam import bind_experts, experts_modules

# Tokens of the forwards that are measured, after a short context and after a long one. The shortest
# spans every compressor and chunk period seen (4, 64), so that rounding up to whole periods is
# alike in all of them. After a short context all kinds of layers run, of which some loop over their
# tokens; after a long one only those that attend to it, where longer steps cost nothing.
_NEAR_STEPS = (256, 128, 128, 64, 64)
_FAR_STEPS = (1024, 512, 512, 256, 256)

# A context at which attention needs more than anything else, though it may need less at first.
_FAR_TOKENS = 16384


@dataclass(frozen=True)
class Footprint:
    """Bytes that one sequence takes besides the weights; see `ModelGeometry` for the fields."""

    kv_bytes_per_token: int
    kv_fixed_bytes: int
    activation_fixed_bytes: int
    activation_bytes_per_token: int
    activation_bytes_per_context_token: int
    activation_bytes_per_pair: int


def measure(model: PreTrainedModel, vocab: int) -> Footprint:
    """Runs a meta-device model at a few lengths and solves for the coefficients.

    With T new tokens and C tokens of context, the new ones included, once every window is full:
    cache = fixed + per_token * C + held * (T - 1). `held` is what layers that keep a window or a
    state hold on to until the next forward: the tokens that they cut off are still there, because
    what they keep is a view of the whole. It is counted as activations.

    The peak of activations is the largest of several parts, each linear in T, C and T * C, and
    which one it is depends on the lengths. So it is measured after a short and after a long
    context, and the larger of each coefficient is taken: an upper bound of both. Where lengths
    are rounded up to periods inside, it holds for whole periods.
    """
    for module in experts_modules(model).values():
        bind_experts(module, lambda hidden_TH, ids_TK, weights_TK: torch.empty_like(hidden_TH))
    layers = LayerKinds(model)

    def run(indices: list[int], context: int, steps: tuple[int, ...]) -> _Run:
        with layers.only(indices):
            return _Run(partial(_forward, model, vocab), indices, context, steps)

    near = run(layers.first_of_each, _widest_window(model) + max(_NEAR_STEPS), _NEAR_STEPS)
    far = run(near.attending, _FAR_TOKENS, _FAR_STEPS)
    peaks = near.peaks().larger(far.peaks(with_square=True)).covering(near.points)
    per_token, fixed, held = near.cache(layers.kind)
    return Footprint(
        kv_bytes_per_token=per_token,
        kv_fixed_bytes=fixed,
        activation_fixed_bytes=ceil(peaks.fixed),
        activation_bytes_per_token=ceil(peaks.per_token) + held,
        activation_bytes_per_context_token=ceil(peaks.per_context),
        activation_bytes_per_pair=ceil(peaks.per_pair),
    )


@dataclass(frozen=True)
class _Peaks:
    """fixed + per_token * T + per_context * C + per_pair * T * C, bytes."""

    fixed: float
    per_token: float
    per_context: float
    per_pair: float

    def larger(self, other: _Peaks) -> _Peaks:
        return _Peaks(*map(max, astuple(self), astuple(other)))

    def at(self, num_tokens: int, context: int) -> float:
        return (
            self.fixed
            + self.per_token * num_tokens
            + self.per_context * context
            + self.per_pair * num_tokens * context
        )

    def covering(self, points: Iterable[tuple[int, int, int]]) -> _Peaks:
        """At least the peak at each (T, C, peak), by as much per token as is missing."""
        missing = max((peak - self.at(t, c)) / t for t, c, peak in points)
        return replace(self, per_token=self.per_token + max(0.0, missing))


_Forward = Callable[[int, Cache | None], tuple[Cache, int]]


class _Run:
    """Forwards of a few lengths after a context, with a few of the model's layers.

    Args:
        forward: (new tokens, cache) -> cache and peak bytes.
        layers: indices of the layers that run.
        context: tokens before the first step.
        steps: tokens of each forward: one, then two equal ones, then two equal shorter ones.

    Attributes:
        points: (T, C, peak) of each forward, the first one over the context included.
        attending: those of the layers that keep keys and values.
    """

    def __init__(
        self, forward: _Forward, layers: list[int], context: int, steps: tuple[int, ...]
    ) -> None:
        self._steps = steps
        self._cache: list[dict[int, int]] = []  # bytes by layer, after each step
        cache, peak = forward(context, None)
        self.points = [(context, context, peak)]
        for num_tokens in steps:
            cache, peak = forward(num_tokens, cache)
            context += num_tokens
            self.points.append((num_tokens, context, peak))
            self._cache.append({layer: _layer_bytes(cache, layer) for layer in layers})
        self.attending = [layer for layer in layers if _attends(cache, layer)]

    def cache(self, kind: list[int]) -> tuple[int, int, int]:
        """Per token, fixed and held bytes of all layers, of which the first of each kind ran."""
        total = [sum(sizes[layer] for layer in kind) for sizes in self._cache]
        longer, shorter = self._steps[2], self._steps[4]
        per_token = (total[2] - total[1]) // longer
        held = per_token * 2 * shorter - (total[4] - total[2])
        held = max(0, ceil(held / (longer - shorter)))
        _, context, _ = self.points[-1]
        fixed = total[4] - per_token * context - held * (shorter - 1)
        return per_token, max(0, fixed), held

    def peaks(self, *, with_square: bool = False) -> _Peaks:
        """The coefficients.

        Args:
            with_square: count T * T as well, which new tokens that attend to each other and to a
                window take. T is at most C, so it is counted as T * C. Where a kink is likelier
                than a square, the steeper of two slopes is taken instead.
        """
        _, context, peak = zip(*self.points[1:], strict=True)
        longer, shorter = self._steps[2], self._steps[4]
        slope_long = (peak[2] - peak[1]) / longer  # per_pair * longer + per_context
        slope_short = (peak[4] - peak[3]) / shorter
        per_pair = max(0.0, (slope_long - slope_short) / (longer - shorter))
        per_context = max(0.0, slope_short - per_pair * shorter)
        rest = {
            num_tokens: peak[i] - context[i] * (per_context + per_pair * num_tokens)
            for i, num_tokens in enumerate(self._steps)
        }
        (t0, r0), (t1, r1), (t2, r2) = sorted(rest.items())
        steep, flat = (r2 - r1) / (t2 - t1), (r1 - r0) / (t1 - t0)
        square = max(0.0, (steep - flat) / (t2 - t0)) if with_square else 0.0
        per_token = max(0.0, steep - square * (t2 + t1))
        fixed = max(r - t * (per_token + square * t) for t, r in rest.items())
        return _Peaks(max(0.0, fixed), per_token, per_context, per_pair + square)


def _widest_window(model: PreTrainedModel) -> int:
    text = model.config.get_text_config()
    names = ("sliding_window", "attention_chunk_size", "sliding_window_size")
    values = [getattr(text, name, None) for name in names]
    return max((v for v in values if isinstance(v, int)), default=0)


def _forward(
    model: PreTrainedModel, vocab: int, num_tokens: int, cache: Cache | None
) -> tuple[Cache, int]:
    """One meta forward; returns the cache and the peak bytes of tensors born in it.

    The new cache tensors of the few layers that run are among them: a concatenating cache holds
    old and new at once.
    """
    ids = torch.zeros((1, num_tokens), dtype=torch.int64, device="meta")
    with torch.no_grad(), plain_text(), _FusedAttention(), PeakBytes() as peak:
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values  # a first call without one lets the model make its own kind
        del out
    return cache, peak.peak


def _storages(value: Any) -> dict[int, int]:
    """Storage id -> bytes of all tensors in a nested value, each storage once."""
    storages = (tensor.untyped_storage() for tensor in _tensors_of(value))
    return {storage._cdata: storage.nbytes() for storage in storages}


def _tensors_of(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_of(item)
    elif isinstance(value, CacheLayerMixin | LinearAttentionCacheLayerMixin):
        yield from _tensors_of(vars(value))


def _attends(cache: Cache, layer: int) -> bool:
    entry = cache.layers[layer] if layer < len(cache.layers) else None
    return isinstance(entry, CacheLayerMixin) and bool(_storages(vars(entry)))


def _layer_bytes(cache: Cache, layer: int) -> int:
    """Bytes of one layer's entry in every list that a cache keeps."""
    lists = (value for value in vars(cache).values() if isinstance(value, list))
    entries = [entries[layer] for entries in lists if layer < len(entries)]
    return sum(_storages(entries).values())


class _FusedAttention(TorchFunctionMode):
    """Counts `scaled_dot_product_attention` as one kernel, as it is on a GPU.

    Its mask of booleans is made one of floats first, and copied once more where its rows are not
    aligned. The copies are kept until the next call: at the short lengths that are measured the
    peak lies elsewhere, at long ones it lies here.
    """

    _mask: torch.Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, value = args[0], args[2]
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            self._mask = None
            if mask is not None and mask.dtype == torch.bool:
                self._mask = query.new_empty((2, *mask.shape))
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **kwargs)


class PeakBytes(TorchDispatchMode):
    """Sums the storages that operators create and that are still referenced."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in _tensors_of((args, kwargs or {}))}
        for tensor in _tensors_of(out):
            self._track(tensor.untyped_storage(), known)
        return out

    def _track(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        key = storage._cdata
        if key in self._seen or key in known:
            return
        self._seen[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._seen.pop(key, 0)
