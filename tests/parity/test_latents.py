"""Models that keep latents (MLA) over our pool: they say what stock says, which expands them.

Bounds are those of `cache_support`: the absorbed form sums the same products as stock's expansion
in another order, and the errors that it may make are those of stock's matrix and attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hotset.bench.shapes import shape_config
from hotset.core.config import EngineConfig
from hotset.core.geometry import Latent
from hotset.core.machine import MachineDescription
from hotset.kernels.attention import AttentionKernels
from hotset.models import latents
from hotset.models.attention import AttentionSwitch
from hotset.models.attention_probe import find_attention
from hotset.models.geometry import build_meta
from hotset.runtime import kv_cache
from hotset.runtime.planning import plan_engine
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

# Plain, no low rank of queries, positions that scale queries, layers of a state beside them; and
# those whose layers are like the first one's.
MODELS = ["deepseek_v3", "deepseek_v2", "mistral4", "kimi_linear", "glm4_moe_lite"]
ALIKE = ["axk1", "bailing_hybrid", "kimi_k25"]
NUM_TOKENS = 24


@pytest.fixture(
    scope="module",
    params=[*MODELS, *(pytest.param(name, marks=pytest.mark.sweep) for name in ALIKE)],
)
def stock(request: pytest.FixtureRequest) -> Stock:
    return generate_stock(request.param, PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def deepseek() -> Stock:
    return generate_stock("deepseek_v3", PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("chunk", [None, 7])
def test_decode_says_what_stock_says(stock: Stock, chunk: int | None) -> None:
    """Rows of different lengths together, with padding; greedy tokens are the same."""
    logits = decode_both(stock, Ours(stock, num_rows=2), chunk=chunk)
    assert largest_difference(stock, logits) <= logits_bound(stock)
    assert [part.argmax(-1).tolist() for part in logits] == stock.tokens


def test_with_the_triton_kernel(deepseek: Stock) -> None:
    """One step: in the interpreter it takes seconds."""
    one = Stock(
        deepseek.model,
        deepseek.layers,
        PROMPTS,
        tokens=[tokens[:2] for tokens in deepseek.tokens],
        logits=[logits_TV[:2] for logits_TV in deepseek.logits],
    )
    ours = Ours(deepseek, num_rows=2)
    logits = decode_both(one, ours, kernels=AttentionKernels("triton"))
    assert largest_difference(one, logits) <= logits_bound(deepseek)


def _values_of_the_next_column(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(q: torch.Tensor, weight: torch.Tensor, rope_dim: int, attend: Any) -> torch.Tensor:
        return right(q, weight.roll(1, dims=1), rope_dim, attend)

    return wrong


def _no_rotary_part(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(q: torch.Tensor, weight: torch.Tensor, rope_dim: int, attend: Any) -> torch.Tensor:
        return right(q, weight, rope_dim, lambda q_BQR, q_BQD: attend(q_BQR, 0 * q_BQD))

    return wrong


@pytest.mark.parametrize("mistake", [_values_of_the_next_column, _no_rotary_part])
def test_control_mistakes_are_caught(
    deepseek: Stock, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "attend_absorbed", mistake(latents.attend_absorbed))
    wrong = decode_both(deepseek, Ours(deepseek, num_rows=2))
    assert largest_difference(deepseek, wrong) > 20 * logits_bound(deepseek)


def test_a_prompts_heads_a_few_at_a_time(deepseek: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 heads 3, then 1; and one by one where not even one fits."""
    ids, sizes = PROMPTS[1], []
    with torch.no_grad():
        want_TV = deepseek.model(input_ids=torch.tensor([ids])).logits[0]
    expand = latents.expand

    def watched(*args: torch.Tensor, value_dim: int) -> Any:
        sizes.append(len(args[2]))
        return expand(*args, value_dim=value_dim)

    monkeypatch.setattr(latents, "expand", watched)
    one_head = 4 * latents.expanded_elements(16, 8) * len(ids)
    for limit, expected in ((3 * one_head, [3, 1] * 4), (one_head - 1, [1] * 16)):
        monkeypatch.setattr(latents, "EXPANDED_BYTES", limit)
        sizes.clear()
        ours = Ours(deepseek, num_rows=1)
        got_TV = ours.prefill(ours.pool.open(), ids)
        assert sizes == expected
        assert float((got_TV - want_TV).abs().max()) <= logits_bound(deepseek)


def test_the_pool_holds_latents_and_nothing_else(deepseek: Stock) -> None:
    """One head: a latent of 16 and a rotary part of 8 for each token and layer, as it is planned;
    expanded keys and values would be 4 * (16 + 8)."""
    geometry = build_meta(tiny_config("deepseek_v3"), "float32").geometry
    assert all(layer.latent == Latent(rank=16, rope_dim=8) for layer in geometry.attention)
    per_token = geometry.num_layers * (16 + 8) * 4
    assert geometry.kv_bytes_per_token == per_token and geometry.kv_fixed_bytes == 0
    pool = Ours(deepseek, num_rows=2).pool
    assert pool.nbytes == 2 * 96 * per_token


@pytest.mark.parametrize("context", [1000, 20_000, 200_000])
def test_what_is_expanded_is_planned(context: int) -> None:
    """All heads of a short context, some of a longer one; of a very long one a single head may be
    more than what is meant for several."""
    config = shape_config("glm-4.7-flash", num_layers=2)
    geometry = build_meta(config).geometry
    layer, sizes = geometry.attention[0], {"context_tokens": context, "prefill_chunk": 512}
    _, plan = plan_engine(
        geometry,
        EngineConfig(model="glm-4.7-flash", **sizes),
        description=MachineDescription.load("rtx-4090"),
    )
    one_head = 2 * latents.expanded_elements(layer.key_dim, layer.value_dim) * context
    at_a_time = min(layer.num_heads, max(1, latents.EXPANDED_BYTES // one_head))
    assert (at_a_time == layer.num_heads) == (context == 1000)
    planned = plan.device["latents"]
    assert at_a_time * one_head <= planned <= latents.EXPANDED_BYTES + one_head


def test_the_bits_of_a_row_are_its_own(deepseek: Stock) -> None:
    assert_own_bits(deepseek)


def test_the_switch_leaves_everything_as_it_was(deepseek: Stock) -> None:
    model, switch = deepseek.model, AttentionSwitch(deepseek.model)
    module = model.model.layers[0].self_attn
    with switch.decode():
        outer = module.expand_kv
        assert outer(1, 2) == (1, 2)
        with pytest.raises(ZeroDivisionError), switch.decode():
            raise ZeroDivisionError
        assert module.expand_kv is outer
    assert "expand_kv" not in vars(module)


def _bias(model: Any, patch: pytest.MonkeyPatch) -> None:
    matrix = model.model.layers[1].self_attn.kv_b_proj
    matrix.bias = torch.nn.Parameter(torch.zeros(len(matrix.weight)))


def _another_expansion(model: Any, patch: pytest.MonkeyPatch) -> None:
    stock = type(model.model.layers[0].self_attn).expand_kv

    def halved(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
        keys, values = stock(self, kv_nope, k_rot)
        return keys, values / 2

    patch.setattr(type(model.model.layers[0].self_attn), "expand_kv", halved)


def _looks_at_the_latents(model: Any, patch: pytest.MonkeyPatch) -> None:
    cls = type(model.model.layers[0].self_attn)
    forward = cls.forward

    def looking(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        update = past_key_values.update

        def scaled(*new: Any) -> Any:
            first, second = update(*new)
            return first * 1.0, second

        past_key_values.update = scaled
        try:
            return forward(self, *args, past_key_values=past_key_values, **kwargs)
        finally:
            del past_key_values.update

    patch.setattr(cls, "forward", looking)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_bias, "layer 1 expands its latents by something else than one matrix"),
        (_another_expansion, "layer 0 expands its latents in a way of its own"),
        (_looks_at_the_latents, "layer 0 computes with what it caches before it attends"),
    ],
)
def test_what_a_layer_does_decides(
    change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny("deepseek_v3")
    assert find_attention(model).ok
    change(model, monkeypatch)
    assert reason in find_attention(model).reason
