"""What a forward pass allocates, found by running the stock model on the meta device.

Shapes on the meta device are exact and cost nothing, so the KV cache of any architecture (MLA
latents, sliding windows, recurrent states, indexers) and its activations are measured here and
not described a second time. Attention through `scaled_dot_product_attention` counts as a fused
kernel: its inputs and output, no scores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)

from hotset.models.layer_kinds import only_first_of_each
from hotset.models.seam import bind_experts, experts_modules

# Spans every compressor and chunk period seen (4, 64, 128), and is short enough to run in
# milliseconds where a linear-attention layer loops over its chunks.
_STEP = 128


@dataclass(frozen=True)
class Footprint:
    """Bytes that one sequence takes besides the weights; see `ModelGeometry` for the fields."""

    kv_bytes_per_token: int
    kv_fixed_bytes: int
    activation_bytes_per_token: int
    activation_bytes_per_context_token: int
    activation_bytes_per_pair: int


def measure(model: PreTrainedModel, vocab: int) -> Footprint:
    """Runs a meta-device model at a few lengths and solves for the coefficients.

    With T new tokens and C tokens of context, the new ones included, once every window is full:
    cache = fixed + per_token * C; activations = a * T + c * C + b * T * C, rounded up.
    """
    for module in experts_modules(model).values():
        bind_experts(module, lambda hidden_TH, ids_TK, weights_TK: torch.empty_like(hidden_TH))
    if _makes_dynamic_cache(model, vocab):
        with only_first_of_each(model) as kind:
            return _solve(model, vocab, kind)
    return _solve(model, vocab, None)


def _makes_dynamic_cache(model: PreTrainedModel, vocab: int) -> bool:
    """Whether the cache keeps one entry for each layer index (minimax's own kind does not)."""
    with only_first_of_each(model):
        cache, _ = _forward(model, vocab, 1, None)
    return type(cache) is DynamicCache


def _solve(model: PreTrainedModel, vocab: int, kind: list[int] | None) -> Footprint:
    step, half = _STEP, _STEP // 2
    context = _widest_window(model) + step
    cache, _ = _forward(model, vocab, context, None)
    peaks, sizes = [], []
    for num_tokens in (step, step, half, half):
        cache, peak = _forward(model, vocab, num_tokens, cache)
        context += num_tokens
        peaks.append((context, peak))
        sizes.append(_cache_bytes(cache, kind))
    per_token = (sizes[1] - sizes[0]) // step
    slope_step = (peaks[1][1] - peaks[0][1]) / step  # b * step + c
    slope_half = (peaks[3][1] - peaks[2][1]) / half  # b * step / 2 + c
    per_pair = max(0.0, (slope_step - slope_half) / half)
    per_context = max(0.0, slope_step - per_pair * step)
    first_context, first_peak = peaks[0]
    rest = first_peak - first_context * (per_context + per_pair * step)
    return Footprint(
        kv_bytes_per_token=per_token,
        kv_fixed_bytes=max(0, sizes[0] - per_token * first_context),
        activation_bytes_per_token=max(0, ceil(rest / step)),
        activation_bytes_per_context_token=ceil(per_context),
        activation_bytes_per_pair=ceil(per_pair),
    )


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
    # Where a model asks for the positions of set mask bits, all are taken as set: the upper bound.
    all_set = fx_config.patch(  # type: ignore[attr-defined]  # added to the module at run time
        meta_nonzero_assume_all_nonzero=True
    )
    with torch.no_grad(), all_set, _FusedAttention(), _PeakBytes() as peak:
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


def _cache_bytes(cache: Cache, kind: list[int] | None) -> int:
    """Bytes of the whole model's cache, of which only the first layer of each kind was run."""
    if kind is None:
        return sum(_storages(vars(cache)).values())
    return sum(sum(_storages(vars(cache.layers[index])).values()) for index in kind)


class _FusedAttention(TorchFunctionMode):
    """Counts `scaled_dot_product_attention` as one kernel, as it is on a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, value = args[0], args[2]
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **kwargs)


class _PeakBytes(TorchDispatchMode):
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
