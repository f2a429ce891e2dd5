"""Stock models over our KV pool say what they say with the library's own cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hotset.core.errors import RequestError
from hotset.models.attention import AttentionSwitch, shared_compilation
from hotset.models.attention_probe import find_attention
from hotset.runtime.kv_cache import DecodeBatch, KVCache
from hotset.runtime.kv_prefill import PrefillStep
from parity.cache_support import (
    KERNELS,
    PROMPTS,
    Ours,
    Stock,
    decode_both,
    generate_stock,
    largest_difference,
    logits_bound,
)
from tiny import build_tiny, tiny_config

MODELS = ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "mimo_v2_flash", "gemma2"]
NUM_TOKENS = 40


@pytest.fixture(scope="module", params=MODELS)
def stock(request: pytest.FixtureRequest) -> Stock:
    return generate_stock(request.param, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("chunk", [None, 7, 16])
def test_decode_says_what_stock_says(stock: Stock, chunk: int | None) -> None:
    bound = logits_bound(stock)
    ours = Ours(stock, num_rows=2)
    logits = decode_both(stock, ours, chunk=chunk)
    assert largest_difference(stock, logits) <= bound
    assert [part.argmax(-1).tolist() for part in logits] == stock.tokens
    assert ours.pool.lengths == [len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS]


def test_control_mistakes_are_caught(stock: Stock) -> None:
    """A window off by one, in either direction; a long one where there is none."""
    bound = logits_bound(stock)
    for change in (-1, 1):
        layers = tuple(
            replace(layer, window=(layer.window or 60) + change) for layer in stock.layers
        )
        wrong = decode_both(stock, Ours(stock, num_rows=2, layers=layers))
        assert largest_difference(stock, wrong) > 20 * bound


def test_every_position_of_a_chunked_prompt(stock: Stock) -> None:
    ids = [*PROMPTS[1], *stock.tokens[1][:-1]]
    with torch.no_grad():
        expected = stock.model(input_ids=torch.tensor([ids])).logits[0]
    bound = logits_bound(stock)
    for chunk in (7, 16, len(ids)):
        ours = Ours(stock, num_rows=1)
        got = ours.prefill(ours.pool.open(), ids, chunk)
        assert float((got - expected).abs().max()) <= bound


@pytest.fixture(scope="module")
def small() -> Stock:
    """Two layers with a window, two with all, sinks."""
    return generate_stock("gpt_oss", PROMPTS, 12)


def test_rows_come_and_go_and_blocks_are_used_again(small: Stock) -> None:
    """The bits of a row are the same whatever it shares the batch and the pool with."""
    ours = Ours(small, num_rows=2)

    def run(row: int, place: int, which: int) -> torch.Tensor:
        batch = DecodeBatch(ours.pool, 2, kernels=KERNELS)
        ours.prefill(row, PROMPTS[which])
        rows: list[int | None] = [None, None]
        rows[place] = row
        batch.assign(rows)
        cache, out = KVCache(batch), []
        for token in small.tokens[which][:-1]:
            out.append(ours.decode(batch, cache, [token, token])[place])
        return torch.stack(out)

    row = ours.pool.open()
    first = run(row, 0, 1)
    ours.pool.close(row)
    other = ours.pool.open()
    run(other, 1, 0)
    row = ours.pool.open()
    assert row != other
    again = run(row, 1, 1)
    assert torch.equal(again, first)


def test_a_batch_changes_between_steps(small: Stock) -> None:
    """One row decodes alone, then both, in other places, then the other alone."""
    bound = logits_bound(small)
    ours = Ours(small, num_rows=2)
    rows = [ours.pool.open() for _ in PROMPTS]
    for row, prompt in zip(rows, PROMPTS, strict=True):
        ours.prefill(row, prompt)
    batch = DecodeBatch(ours.pool, 2, kernels=KERNELS)
    cache, done = KVCache(batch), [0, 0]
    for places in ([0, None], [1, 0], [1, 0], [None, 1], [1, None]):
        batch.assign([None if which is None else rows[which] for which in places])
        for _ in range(2):
            fed = [0 if which is None else small.tokens[which][done[which]] for which in places]
            out_BV = ours.decode(batch, cache, fed)
            for place, which in enumerate(places):
                if which is not None:
                    done[which] += 1
                    expected = small.logits[which][done[which]]
                    assert float((out_BV[place] - expected).abs().max()) <= bound


def test_tensors_of_a_batch_never_move(small: Stock) -> None:
    ours = Ours(small, num_rows=2)
    batch = DecodeBatch(ours.pool, 2, kernels=KERNELS)
    tensors = [batch.lengths_B, batch.position_ids_B1, *batch.tables.values()]
    tensors += [tensor for pair in ours.pool.pools.values() for tensor in pair]
    before = [tensor.data_ptr() for tensor in tensors]
    row = ours.pool.open()
    ours.prefill(row, PROMPTS[0])
    batch.assign([None, row])
    cache = KVCache(batch)
    for token in small.tokens[0][:-1]:
        ours.decode(batch, cache, [0, token])
    assert [tensor.data_ptr() for tensor in tensors] == before
    assert batch.lengths_B.tolist() == [0, ours.pool.lengths[row]]
    assert batch.position_ids_B1.flatten().tolist() == [0, ours.pool.lengths[row] - 1]
    for window, kind in ours.pool.kinds.items():
        assert batch.tables[window][1].tolist() == kind.table_RN[row].tolist()


def test_what_does_not_fit_is_refused_and_nothing_changes(small: Stock) -> None:
    ours = Ours(small, num_rows=1)
    row = ours.pool.open()
    with pytest.raises(RequestError, match="97 tokens do not fit the context of 96"):
        PrefillStep(ours.pool, row, 97, kernels=KERNELS)
    ours.prefill(row, list(range(96)))
    batch = DecodeBatch(ours.pool, 1, kernels=KERNELS)
    batch.assign([row])
    with pytest.raises(RequestError, match="97 tokens do not fit the context of 96"):
        batch.begin_step()
    assert ours.pool.lengths == [96]


def test_tokens_count_when_their_step_is_committed(small: Stock) -> None:
    ours = Ours(small, num_rows=1)
    row = ours.pool.open()
    ours.prefill(row, PROMPTS[1][:20])
    step = PrefillStep(ours.pool, row, 9, kernels=KERNELS)
    with torch.no_grad(), ours.switch.decode():
        ours.model(
            input_ids=torch.zeros(1, 9, dtype=torch.int64),
            position_ids=step.position_ids,
            past_key_values=KVCache(step),
            use_cache=True,
        )
    assert ours.pool.lengths[row] == 20
    step.commit()
    assert ours.pool.lengths[row] == 29


def test_the_switch_leaves_everything_as_it_was(small: Stock) -> None:
    model, switch = small.model, AttentionSwitch(small.model)
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with pytest.raises(ZeroDivisionError), switch.decode():
            assert model.config._attn_implementation == "hotset"
            raise ZeroDivisionError
        assert model.config._attn_implementation == "eager"
        assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_layers_share_their_compilation(model_type: str) -> None:
    """As many graphs for four layers as for two: nothing in them is of one layer alone."""
    counts = []
    for num_layers in (2, 4):
        config: Any = tiny_config(model_type)
        config.num_hidden_layers, config.first_k_dense_replace = num_layers, 0
        stock = build_tiny(model_type, config=config)
        layers = find_attention(stock).layers
        stock.set_experts_implementation("batched_mm")
        ours = Ours(Stock(stock, layers, PROMPTS), num_rows=1)
        ours.prefill(ours.pool.open(), PROMPTS[0])
        batch = DecodeBatch(ours.pool, 1, kernels=KERNELS)
        batch.assign([0])
        graphs: list[Any] = []

        def count(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        with shared_compilation(stock, [layer.path for layer in layers]):
            for layer in stock.model.layers:
                layer.forward = torch.compile(layer.forward, backend=count, dynamic=False)
            ours.decode(batch, KVCache(batch), [1])
        assert all(isinstance(layer.self_attn.layer_idx, int) for layer in stock.model.layers)
        counts.append(len(graphs))
        torch._dynamo.reset()
    assert counts[0] == counts[1] > 0
