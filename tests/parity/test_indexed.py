"""Models whose indexers choose what is attended to (DSA) over our pool: they say what stock says.

With a top-k far below the context, so that what is chosen matters. Bounds are those of
`cache_support`: where the same positions are chosen the sums are those of any attention over
latents; a choice that differed would show as a difference thousands of times as large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v32 import modeling_deepseek_v32

from hotset.core.geometry import Indexer
from hotset.kernels import selection
from hotset.kernels.attention import AttentionKernels
from hotset.models import attention_watch, indexers
from hotset.models.attention_probe import find_attention
from hotset.models.geometry import build_meta
from hotset.runtime import choosing, index_pool, kv_prefill
from parity.cache_support import (
    PROMPTS,
    Ours,
    Stock,
    assert_own_bits,
    decode_both,
    generate_stock,
    largest_difference,
    logits_bound,
)
from tiny import build_tiny, tiny_config

TOP_K = 12
NUM_TOKENS = 24
# One indexer for each layer; shared by layers behind it; pools of four; sinks.
MODELS = ["deepseek_v32", "glm_moe_dsa", "glm5_next", "hy_v4"]
ALIKE = ["axk2", "mistral_large4"]


def indexed_config(name: str) -> Any:
    config = tiny_config(name)
    text = config.get_text_config()
    # Scores that are exactly 0, all heads below it, are equal, and stock chooses any: few of them.
    text.index_n_heads = 16
    text.index_topk = TOP_K
    if name in ("glm_moe_dsa", "hy_v4"):
        text.indexer_types = ["full", "shared", "full", "shared"]
    return config


@pytest.fixture(
    scope="module",
    params=[*MODELS, *(pytest.param(name, marks=pytest.mark.sweep) for name in ALIKE)],
)
def stock(request: pytest.FixtureRequest) -> Stock:
    return generate_stock(request.param, PROMPTS, NUM_TOKENS, config=indexed_config(request.param))


@pytest.fixture(scope="module")
def pooled() -> Stock:
    return generate_stock("glm5_next", PROMPTS, NUM_TOKENS, config=indexed_config("glm5_next"))


@pytest.mark.parametrize("chunk", [None, 7])
def test_decode_says_what_stock_says(stock: Stock, chunk: int | None) -> None:
    """Rows of different lengths together, with padding; a prompt whole, and in chunks that cut
    pools."""
    logits = decode_both(stock, Ours(stock, num_rows=2), chunk=chunk)
    assert largest_difference(stock, logits) <= logits_bound(stock)
    assert [part.argmax(-1).tolist() for part in logits] == stock.tokens


def test_with_the_triton_kernels(pooled: Stock) -> None:
    """One step: in the interpreter it takes seconds."""
    one = replace(
        pooled,
        tokens=[tokens[:2] for tokens in pooled.tokens],
        logits=[logits_TV[:2] for logits_TV in pooled.logits],
    )
    logits = decode_both(one, Ours(pooled, num_rows=2), kernels=AttentionKernels("triton"))
    assert largest_difference(one, logits) <= logits_bound(pooled)


def _the_first_candidates(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(scores_NP: torch.Tensor, counts_N: torch.Tensor, top_k: int) -> torch.Tensor:
        return right(torch.zeros_like(scores_NP), counts_N, top_k)

    return wrong


def _no_tail(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(chosen: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, *a: Any, **k: Any):  # type: ignore[no-untyped-def]
        slots, number = right(chosen, counts, lengths, *a, **k)
        return slots, number - (lengths - counts * k["pool"])

    return wrong


@pytest.mark.parametrize(
    ("name", "mistake"), [("choose", _the_first_candidates), ("chosen_slots", _no_tail)]
)
def test_control_mistakes_are_caught(
    pooled: Stock, name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, name, mistake(getattr(selection, name)))
    wrong = decode_both(pooled, Ours(pooled, num_rows=2))
    assert largest_difference(pooled, wrong) > 20 * logits_bound(pooled)


def test_control_a_stale_pool_is_caught(pooled: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a pool that is missing from its key."""

    def without_last(keys: torch.Tensor, gates: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        gates = gates.clone()
        gates[:, -1] = -torch.inf
        return indexers.pool_keys(keys, gates, bias)

    monkeypatch.setattr(index_pool, "pool_keys", without_last)
    wrong = decode_both(pooled, Ours(pooled, num_rows=2))
    assert largest_difference(pooled, wrong) > 20 * logits_bound(pooled)


def test_tokens_of_a_prompt_a_few_at_a_time(pooled: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many are chosen for, or attend, at a time changes shapes of products and nothing else."""
    ids = PROMPTS[1]

    def prefill() -> torch.Tensor:
        ours = Ours(pooled, num_rows=1)
        return ours.prefill(ours.pool.open(), ids)

    whole = prefill()
    monkeypatch.setattr(choosing, "CHOOSING_BYTES", 1)
    monkeypatch.setattr(kv_prefill, "CHOSEN_TOKENS", 5)
    assert float((prefill() - whole).abs().max()) <= logits_bound(pooled)


def test_a_context_without_choice_is_attended_to_whole() -> None:
    """Where no row can outgrow what may be chosen no score is computed, and nothing is different:
    a model whose top-k is larger than its context, against one that chooses all there is."""
    config = indexed_config("deepseek_v32")
    config.index_topk = 96
    stock = generate_stock("deepseek_v32", PROMPTS, NUM_TOKENS, config=config)
    whole = decode_both(stock, Ours(stock, num_rows=2))
    more = tuple(replace(layer, indexer=replace(layer.indexer, top_k=95)) for layer in stock.layers)  # type: ignore[type-var]
    ours = Ours(stock, num_rows=2, layers=more)
    for module in stock.model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 95
    chosen = decode_both(stock, ours)
    for one, other in zip(whole, chosen, strict=True):
        assert float((one - other).abs().max()) <= logits_bound(stock)


def test_the_bits_of_a_row_are_its_own() -> None:
    name = "glm_moe_dsa"
    assert_own_bits(generate_stock(name, PROMPTS, 6, config=indexed_config(name)))


@pytest.mark.parametrize(("model_type", "pool"), [("deepseek_v32", 1), ("glm5_next", 4)])
def test_the_pool_holds_what_is_planned(model_type: str, pool: int) -> None:
    """A latent, a rotary part and one key for each candidate; a block of keys for padding, and
    for each row, padding too, what its newest pool is made of."""
    config = indexed_config(model_type)
    geometry = build_meta(config, "float32").geometry
    layers = geometry.attention
    assert {layer.indexer for layer in layers} == {Indexer(16, 16, TOP_K, pool)}
    rope = 0 if model_type == "glm5_next" else 8
    assert geometry.kv_bytes_per_token == len(layers) * (16 + rope + 16 // pool) * 4
    stock = Stock(build_tiny(model_type, config=config), layers, PROMPTS, geometry.states)
    ours = Ours(stock, num_rows=2)
    recent = 3 * 2 * pool * 16 * 4 if pool > 1 else 0
    extra = len(layers) * (8 // pool * 16 * 4 + recent)
    assert ours.pool.nbytes == 2 * 96 * geometry.kv_bytes_per_token + extra


def _with_kink(kink: Callable[[Any], Any]) -> Callable[..., None]:
    def change(model: Any, patch: pytest.MonkeyPatch) -> None:
        names = {**vars(torch.nn.functional), "relu": kink}
        patch.setattr(modeling_deepseek_v32, "F", SimpleNamespace(**names))

    return change


def _attends_to_everything(model: Any, patch: pytest.MonkeyPatch) -> None:
    function = attention_watch.AttentionInterface._global_mapping[attention_watch.PREFILL]

    def without(*args: Any, indices: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    mapping = attention_watch.AttentionInterface._global_mapping
    patch.setitem(mapping, attention_watch.PREFILL, without)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_with_kink(torch.nn.functional.softplus), "computes with its keys (`softplus`)"),
        (_with_kink(lambda x: x.clamp(min=0)), "an indexer uses `clamp` of its products"),
        (_with_kink(abs), "an indexer computes with its keys (bad operand type"),
        (_with_kink(lambda x: x * x), "an indexer scales its products by more than a number"),
        (_attends_to_everything, "layer 0 chooses, and attends to everything"),
    ],
)
def test_what_a_layer_does_decides(
    change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny("deepseek_v32")
    assert find_attention(model).ok
    change(model, monkeypatch)
    assert reason in find_attention(model).reason


def test_another_choice_of_pools_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = indexed_config("glm5_next")
    config.get_text_config().index_kpool = 3
    reason = find_attention(build_tiny("glm5_next", config=config)).reason
    assert reason == "layer 1 chooses 12 positions in pools of 3"
    model = build_tiny("glm5_next")
    assert find_attention(model).ok
    for module in model.modules():
        if hasattr(module, "index_kpool_always_select_tail"):
            module.index_kpool_always_select_tail = False
    reason = find_attention(model).reason
    assert reason == "layer 1 chooses what it attends to in a way of its own"
