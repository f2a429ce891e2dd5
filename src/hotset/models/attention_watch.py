"""A stock model's forward, watched: what its cache is asked for and its attention function gets.

Knows transformers' caches, masks and attention functions; what may be concluded is
`attention_probe`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache

from hotset.core.geometry import Indexer
from hotset.models.attention import Expand, selection_of
from hotset.models.indexer_probe import shape_of
from hotset.models.indexers import IndexKeys, PooledKeys, Selection
from hotset.models.state_probe import LayerWatch

# Names of implementations: without masks, or with one that is not looked into, when it decodes.
PREFILL, DECODE = "hotset_probe_prefill", "hotset_probe_decode"
DECODE_CHOSEN = "hotset_probe_decode_chosen"


class RefusedError(Exception):
    """Why a model does not run over the pool, as a clause."""


@dataclass
class Attended:
    """One call of an attention function with what a cache returned.

    Attributes:
        mask: that it got, unless
        selection: what was chosen for it takes its place.
    """

    module: nn.Module
    num_heads: int
    mask: torch.Tensor | None
    selection: Selection | None
    arguments: dict[str, Any]


@dataclass
class Update:
    """One call of a cache's `update`, and what became of the two tensors that it returned.

    Attributes:
        expanded: shapes of the keys and values that a module's `expand_kv` made of them; these
            count as them from then on.
    """

    key_shape: torch.Size
    value_shape: torch.Size
    expanded: tuple[torch.Size, torch.Size] | None = None
    touched_by: set[str] = field(default_factory=set)
    attended: list[Attended] = field(default_factory=list)


_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]


class _Watched(torch.Tensor):
    """A tensor that remembers every operation on it, asking for its shape included."""

    update: Update

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, cls):
                name = getattr(func, "__name__", str(func))
                value.update.touched_by.add("shape" if func == _SHAPE else name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def of(cls, tensor: torch.Tensor, update: Update) -> _Watched:
        watched = tensor.as_subclass(cls)
        watched.update = update
        return watched


class ProbeCache(DynamicCache):
    """The library's cache, watched; `updates` and `asked_length` are of the current forward."""

    def __init__(self, model: PreTrainedModel, *, makes_mask: bool) -> None:
        super().__init__(config=model.config)
        self._makes_mask = makes_mask
        self.watch = LayerWatch(model)
        self.start()

    def start(self) -> None:
        self.updates: dict[int, list[Update]] = {}
        self.indexers: dict[int, Indexer] = {}
        self.selections: list[Selection] = []
        self.asked_length = False

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *a: Any,
        **k: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        update = Update(key_states.shape, value_states.shape)
        self.updates.setdefault(layer_idx, []).append(update)
        keys, values = super().update(key_states, value_states, layer_idx, *a, **k)
        return _Watched.of(keys, update), _Watched.of(values, update)

    def update_indexer(  # type: ignore[override]  # no tensor is what it is about
        self, new: torch.Tensor | PooledKeys, layer_idx: int
    ) -> IndexKeys:
        if layer_idx in self.indexers:
            raise RefusedError(f"layer {layer_idx} indexes twice in a forward")

        def choose(q_BTHD: torch.Tensor, weights_BTH: torch.Tensor, top_k: int) -> Selection:
            try:
                self.indexers[layer_idx] = shape_of(new, q_BTHD, weights_BTH, top_k)
            except ValueError as refused:
                raise RefusedError(f"layer {layer_idx} {refused}") from refused
            self.selections.append(Selection())
            return self.selections[-1]

        return IndexKeys(choose)

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

    def get_query_offset(self, layer_idx: int = 0) -> int:
        self.asked_length |= not self._makes_mask  # for a mask that nobody looks into
        return int(super().get_seq_length(layer_idx))

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
        selection = selection_of(attention_mask, arguments.pop("indices", None))
        mask = None if isinstance(attention_mask, Selection) else attention_mask
        seen = Attended(module, query.shape[1], mask, selection, arguments)
        key.update.attended.append(seen)
    with torch._C.DisableTorchFunctionSubclass():
        batch, num_heads, num_tokens = query.shape[:3]
        return query.new_zeros(batch, num_tokens, num_heads, value.shape[-1]), None


def probe_expand(module: nn.Module) -> Expand:
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


AttentionInterface.register(PREFILL, _probe_attend)
AttentionInterface.register(DECODE, _probe_attend)
AttentionInterface.register(DECODE_CHOSEN, _probe_attend)
AttentionMaskInterface.register(PREFILL, _probe_mask)
AttentionMaskInterface.register(DECODE_CHOSEN, _probe_mask)
