"""The seam into transformers' indexers (DeepSeek Sparse Attention): which positions a token sees.

    score_p = sum_h w_h relu(q_h . k_p)          the top-k positions are attended to

A stock indexer hands its keys to the cache and multiplies queries with what it gets back. Our cache
gives it `IndexKeys`, which has no values: it takes down what the stock code does with it, one step
after the other, and where the stock code asks for the top-k it asks the cache to choose. So
queries, keys and weights are the stock code's own, rotary parts and norms included. An indexer that
pools neighbouring keys looks into what it cached, and is written anew here (`pooled_forward`);
`indexer_probe` shows that it chooses the same.

What is chosen goes through the stock code as it is, to the attention function. Knows one layer's
indexer; nothing of pools, rows or positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Selection:
    """What the newest tokens of a step attend to.

    Attributes:
        num_dense: of the first so many tokens all that is before them; the others only
        slots_NK: these places of a pool, int32, ascending, of which the first
        counts_N: int32, count. Both are `None` where every token attends to everything.
    """

    num_dense: int = 0
    slots_NK: torch.Tensor | None = None
    counts_N: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class PooledKeys:
    """What an indexer caches of new tokens whose candidates are pools of neighbours.

    Attributes:
        keys_BTD: keys.
        gates_BTD: how much of each column of its pool's key a token is, before the softmax.
        bias_GD: FP32, added to the gates by the place in the pool.
    """

    keys_BTD: torch.Tensor
    gates_BTD: torch.Tensor
    bias_GD: torch.Tensor


def pool_keys(
    keys_PGD: torch.Tensor, gates_PGD: torch.Tensor, bias_GD: torch.Tensor
) -> torch.Tensor:
    """One key for each whole pool, [P, D]: `Glm5NextTextIndexer.get_pooled_states`."""
    shares = (gates_PGD.float() + bias_GD).softmax(dim=1).to(keys_PGD.dtype)
    return (shares * keys_PGD).sum(dim=1)


# (q [B, T, H, D], FP32 w [B, T, H], top-k) -> what is chosen
Choose = Callable[[torch.Tensor, torch.Tensor, int], Selection]


class UnknownIndexerError(AttributeError):
    """What a stock indexer does with its keys, as a clause."""


@dataclass(frozen=True, eq=False)
class IndexKeys:
    """All keys of a layer, or what stock code has made of them so far; only what leads to the
    scores above is possible.

    Attributes:
        choose: asks the cache.
        step: what it stands for, from keys over products, heads (behind the relu) and scores to
            indices.
        query: q of the products, and
        weights: w of the scores.
        scale: factor of the products.
    """

    choose: Choose
    step: str = "keys"
    query: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    scale: float = 1.0
    selection: Selection | None = None

    def _next(self, step: str, *, after: str, **found: Any) -> IndexKeys:
        if self.step != after:
            raise UnknownIndexerError(f"takes its {self.step} for {after}")
        return replace(self, step=step, **found)

    def __getattr__(self, name: str) -> Any:
        raise UnknownIndexerError(f"uses `{name}` of its {self.step}")

    def transpose(self, *dims: int) -> IndexKeys:
        return self._next("turned keys", after="keys")

    def unsqueeze(self, dim: int) -> IndexKeys:
        return self._next("headed keys", after="turned keys")

    def __mul__(self, scale: object) -> IndexKeys:
        if not isinstance(scale, float) or scale <= 0:
            raise UnknownIndexerError("scales its products by more than a number")
        return replace(self._next("products", after="products"), scale=self.scale * scale)

    def squeeze(self, dim: int) -> IndexKeys:
        return self._next("scores", after="row of scores")

    def masked_fill(self, mask: torch.Tensor, value: object) -> IndexKeys:
        """What is behind a query: the cache knows that itself."""
        return self._next("masked scores", after="scores")

    def __add__(self, mask: torch.Tensor) -> IndexKeys:
        return self._next("masked scores", after="scores")

    @property
    def shape(self) -> tuple[int, ...]:
        """So many positions that any top-k is possible."""
        if self.step not in ("scores", "masked scores"):
            raise UnknownIndexerError(f"asks for the shape of its {self.step}")
        return (1 << 62,)

    def topk(self, k: int, dim: int) -> IndexKeys:
        assert self.query is not None and self.weights is not None
        chosen = self._next("indices", after="masked scores")
        selection = self.choose(self.query, (self.weights * self.scale).squeeze(-2), k)
        return replace(chosen, selection=selection)

    @property
    def indices(self) -> IndexKeys:
        return self

    def to(self, dtype: torch.dtype) -> Selection:
        assert self.selection is not None
        return self.selection

    def float(self) -> IndexKeys:
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> IndexKeys:
        if func is torch.matmul and isinstance(args[1], cls) and isinstance(args[0], torch.Tensor):
            other, keys = args[0], args[1]
            if keys.step == "headed keys":
                return keys._next("products", after="headed keys", query=other)
            return keys._next("row of scores", after="heads", weights=other)
        if func is nn.functional.relu:
            return cast(IndexKeys, args[0])._next("heads", after="products")
        raise UnknownIndexerError(f"computes with its keys (`{getattr(func, '__name__', func)}`)")


def is_pooled(indexer: nn.Module) -> bool:
    """Whether an indexer's candidates are pools, as those of glm5_next."""
    return hasattr(indexer, "index_kpool")


def pooled_forward(
    module: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    attention_mask: torch.Tensor,
    past_key_values: Any,
) -> Selection:
    """`Glm5NextTextIndexer.forward` of one text without padding."""
    batch, num_tokens = hidden_states.shape[:2]
    query = module.wq_b(q_resid).view(batch, num_tokens, module.n_heads, module.head_dim)
    keys = PooledKeys(
        module.k_norm(module.wk(hidden_states)),
        nn.functional.linear(hidden_states, module.index_kpool_compress_gate),
        module.index_kpool_compress_ape.float(),
    )
    weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float()
    weights = weights * (module.n_heads**-0.5 * module.softmax_scale)
    cached = past_key_values.update_indexer(keys, module.layer_idx)
    return cached.choose(query, weights, module.index_topk)  # type: ignore[no-any-return]


def _pass_on(topk_indices: Selection, **others: Any) -> Selection:
    """In the place of `build_attention_mask_from_topk`."""
    return topk_indices


def replacements(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """(module, attribute, what it is) while a model's caches are ours."""
    found: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        indexer = getattr(module, "indexer", None)
        if hasattr(module, "build_attention_mask_from_topk"):
            found.append((module, "build_attention_mask_from_topk", _pass_on))
        if isinstance(indexer, nn.Module):
            found.append((indexer, "forward", torch.compiler.disable(_forward_of(indexer))))
    return found


def _forward_of(indexer: nn.Module) -> Callable[..., Any]:
    if not is_pooled(indexer):
        return indexer.forward

    def forward(*args: Any, **kwargs: Any) -> Selection:
        with torch.no_grad():
            return pooled_forward(indexer, *args, **kwargs)

    return forward
