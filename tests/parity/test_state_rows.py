"""Stock models with convolutions and recurrences over our KV pool, whose rows carry their states.

Every pool is full of NaN at first, states included, so that what is read without having been
written shows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import BackendCompilerFailed
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from families import Family, difference, make_family, text
from hotset.models.attention import shared_compilation
from hotset.models.attention_probe import find_attention
from hotset.models.linear_kernels import (
    keep_to_plain_torch,
    missing_packages,
    plain_torch,
    used_packages,
)
from hotset.runtime import state_rows
from hotset.runtime.decoding import warn_of_plain_torch
from hotset.runtime.engine import Engine
from hotset.runtime.kv_cache import DecodeBatch, KVCache
from hotset.runtime.requests import Request
from hotset.runtime.state_rows import StateRows, state_bytes
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
from scheduling import Answers
from tiny import build_tiny, tiny_config

# Gated delta rule, alone and in a composite model; Mamba 2 with and without a gate, Mamba 1; a
# convolution without a recurrence; convolution, recurrence, keys and values in one layer.
MODELS = (
    "qwen3_next",
    "qwen3_5_moe",
    "granitemoehybrid",
    "nemotron_h",
    "jamba",
    "lfm2_moe",
    "zaya",
)
ONE_FORWARD = ("jamba",)  # cannot continue a prompt but token by token
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=MODELS)
def stock(request: pytest.FixtureRequest) -> Stock:
    return generate_stock(request.param, PROMPTS, NUM_TOKENS)


def test_rows_of_different_length_decode_together(stock: Stock) -> None:
    """Prompts in one forward, in chunks that cut through every period, and token by token: a
    chunk of one token begins from the state as a decode step does."""
    chunks = (None, 1) if stock.model.config.model_type in ONE_FORWARD else (None, 7, 1)
    bound = logits_bound(stock)
    for chunk in chunks:
        logits = decode_both(stock, Ours(stock, num_rows=2), chunk=chunk)
        assert largest_difference(stock, logits) <= bound


def test_control_a_wrong_state_is_caught(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that stay what they were at the end of the prompt."""
    ours, bound = Ours(stock, num_rows=2), logits_bound(stock)
    monkeypatch.setattr(ours.pool.states, "put_back", lambda rows_B: None)
    assert largest_difference(stock, decode_both(stock, ours)) > 10 * bound


@pytest.fixture(scope="module")
def small() -> Stock:
    stock = generate_stock("qwen3_next", PROMPTS, 6)
    # The stock loop multiplies all tokens of an expert at once, so that a row's low bits would
    # depend on what the others route.
    stock.model.set_experts_implementation("batched_mm")
    return stock


def test_the_bits_of_a_row_are_its_own(small: Stock) -> None:
    """Whoever had its row before, and beside whom it decodes."""
    ours = Ours(small, num_rows=3)
    batch = DecodeBatch(ours.pool, 2, kernels=KERNELS)

    def run(row: int, beside: int | None) -> torch.Tensor:
        ours.prefill(row, PROMPTS[1])
        batch.assign([beside, row])
        cache, out = KVCache(batch), []
        for token in small.tokens[1][:-1]:
            out.append(ours.decode(batch, cache, [7, token])[1])
        return torch.stack(out)

    row, other = ours.pool.open(), ours.pool.open()
    first = run(row, None)
    ours.prefill(other, PROMPTS[0])
    again = run(ours.pool.open(), other)
    ours.pool.close(row)
    assert ours.pool.open() == row
    assert torch.equal(again, first)
    assert torch.equal(run(row, other), first)


def test_a_prompt_between_steps_and_rows_that_change_places(small: Stock) -> None:
    """A row decodes alone, waits while another's prompt is taken in, and then shares its steps."""
    ours, bound = Ours(small, num_rows=2), logits_bound(small)
    rows = [ours.pool.open() for _ in PROMPTS]
    batch = DecodeBatch(ours.pool, 2, kernels=KERNELS)
    cache, done = KVCache(batch), [0, 0]
    for places in ([0, None], [1, 0], [0, 1], [None, 1]):
        for which in (0, 1):
            if which in places and ours.pool.lengths[rows[which]] == 0:
                ours.prefill(rows[which], PROMPTS[which], None if which else 3)
        batch.assign([None if which is None else rows[which] for which in places])
        fed = [0 if which is None else small.tokens[which][done[which]] for which in places]
        out_BV = ours.decode(batch, cache, fed)
        for place, which in enumerate(places):
            if which is not None:
                done[which] += 1
                assert difference(out_BV[place], small.logits[which][done[which]]) <= bound
    assert done == [3, 3]


def test_states_never_move_and_take_what_was_said(small: Stock) -> None:
    """A captured step has their addresses; a plan has their bytes."""
    ours = Ours(small, num_rows=2)
    states = ours.pool.states
    assert states.nbytes == state_bytes(small.states, num_rows=2, num_places=4)
    batch = DecodeBatch(ours.pool, 4, kernels=KERNELS)
    cache = KVCache(batch)
    index = small.states[0].index
    held = [
        *cache.layers[index].conv_states.values(),
        *cache.layers[index].recurrent_states.values(),
    ]
    assert [t.data_ptr() for t in held] == [t.data_ptr() for t in states.places(index, 4).values()]
    row = ours.pool.open()
    ours.prefill(row, PROMPTS[0])
    batch.assign([row])
    before = [t.clone() for t in states.row(index, row).values()]
    ours.decode(batch, cache, [1, 0, 0, 0])
    after = states.row(index, row).values()
    assert not any(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    now = [
        *cache.layers[index].conv_states.values(),
        *cache.layers[index].recurrent_states.values(),
    ]
    assert all(left is right for left, right in zip(held, now, strict=True))
    ours.pool.close(row)
    assert all(bool(t.isnan().all()) for t in states.row(index, row).values())


def test_layers_share_their_compilation() -> None:
    """As many graphs for two layers with a state as for one, and what they compute is the same."""
    counts = []
    for repeats in (1, 2):
        config: Any = tiny_config("qwen3_next")
        config.layer_types = [*["linear_attention"] * repeats, "full_attention"]
        config.num_hidden_layers = repeats + 1
        stock = build_tiny("qwen3_next", config=config)
        found = find_attention(stock)
        stock.set_experts_implementation("batched_mm")
        ours = Ours(Stock(stock, found.layers, PROMPTS, states=found.states), num_rows=1)
        ours.prefill(ours.pool.open(), PROMPTS[0])
        batch = DecodeBatch(ours.pool, 1, kernels=KERNELS)
        batch.assign([0])
        want_BV = ours.decode(batch, KVCache(batch), [1])
        batch.pool.close(0)
        ours.prefill(ours.pool.open(), PROMPTS[0])
        batch.assign([0])
        graphs: list[Any] = []

        def count(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        with shared_compilation(stock, [layer.path for layer in (*found.layers, *found.states)]):
            for layer in stock.model.layers:
                layer.forward = torch.compile(layer.forward, backend=count, dynamic=False)
            assert torch.equal(ours.decode(batch, KVCache(batch), [1]), want_BV)
        counts.append(len(graphs))
        torch._dynamo.reset()
    assert counts[0] == counts[1] > 0


def test_the_compiler_takes_writes_to_several_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses them where the states are views of one tensor, as the control shows."""
    states = StateRows(
        find_attention(build_tiny("qwen3_next")).states,
        num_rows=2,
        num_places=4,
        device=torch.device("cpu"),
    )
    index = next(iter(states.layers))
    places = states.places(index, 4)
    monkeypatch.setattr(state_rows, "from_dlpack", lambda tensor: tensor)
    views = states.places(index, 4)

    def write(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        first.add_(1)
        return first.sum() + second.add_(2).sum()

    with torch.inference_mode():
        torch.compile(write, backend=aot_eager)(*places.values())
        states.put_back(torch.tensor([0, 1, 2, 2]))
        written = states.row(index, 1).values()
        assert [float(t.unique()) for t in written] == [1.0, 2.0]
        torch._dynamo.reset()
        with pytest.raises(BackendCompilerFailed, match="view"):
            torch.compile(write, backend=aot_eager)(*views.values())
    torch._dynamo.reset()


def test_what_runs_in_plain_torch_on_a_gpu_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Where a package is installed the stock module has chosen it, and nothing is missing."""
    names = {"fla": "flash-linear-attention", "causal_conv1d": "causal_conv1d"}
    want = tuple(sorted(names[name] for name in names if find_spec(name) is None))
    model = build_tiny("qwen3_next")
    assert missing_packages(model) == want
    assert missing_packages(build_tiny("qwen3_moe")) == missing_packages(build_tiny("zaya")) == ()
    warn_of_plain_torch(model, torch.device("cpu"))
    assert not caplog.messages
    warn_of_plain_torch(model, torch.device("cuda"))
    assert len(caplog.messages) == bool(want)
    assert all(name in caplog.text for name in want)


@use_kernel_func_from_hub_with_fallback("degrees", "math")
def degrees(x: float) -> str:
    """A function for which an installed package has another: `math.degrees`."""
    return f"plain {x}"


def test_kernels_of_packages_are_left_out_where_there_is_no_gpu() -> None:
    assert degrees(math.pi) == 180.0
    with plain_torch():
        assert degrees(1.0) == "plain 1.0"
        with plain_torch(), ThreadPoolExecutor() as others:
            assert degrees(1.0) == "plain 1.0"
            assert others.submit(degrees, math.pi).result() == 180.0
    assert degrees(math.pi) == 180.0

    model: Any = build_tiny("qwen3_next")
    used = used_packages(model)
    assert not set(used) & set(missing_packages(model))
    module = sys.modules[type(model).__module__]
    module.degrees = degrees  # type: ignore[attr-defined]
    try:
        assert used_packages(model) == tuple(sorted((*used, "math")))
        model.forward = degrees
        keep_to_plain_torch(model)
        assert model(1.0) == "plain 1.0"
    finally:
        del module.degrees  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family("qwen3_next", tmp_path_factory.mktemp("states"))


@pytest.fixture
def several(family: Family) -> Iterator[Engine]:
    sizes = {"max_batch": 4, "context_tokens": 160, "prefill_chunk": 72}
    with family.engine(batch_invariant=True, **sizes) as engine:
        yield engine


def test_answers_together_are_answers_alone(family: Family, several: Engine) -> None:
    """Prompts of one chunk and of two, which run together; each row has steps of its own, so that
    every token is what it is alone, whatever has a slot."""
    prompts = [text(n, seed=n) for n in (5, 130, 17, 73, 2)]
    with several.scheduling(max_waiting=8) as scheduler:
        numbers = [scheduler.submit(Request(prompt_ids=ids, max_tokens=6)) for ids in prompts]
        got = Answers().run(scheduler)
    with family.engine(share=0.0, policy="none", context_tokens=160, prefill_chunk=72) as alone:
        for number, ids in zip(numbers, prompts, strict=True):
            steps = alone.generate_ids(ids, max_tokens=6, stop_ids=frozenset())
            assert got.tokens[number] == [step.token_id for step in steps]


def test_a_plan_charges_states_of_every_row(family: Family) -> None:
    """What the pool takes is at most what the plan says of it."""
    for max_batch in (1, 3):
        with family.engine(max_batch=max_batch) as engine:
            assert engine.decoding is not None
            pool = engine.decoding.pool
            planned = engine.plan.device["KV cache"] + engine.plan.device["KV blocks"]
            assert pool.nbytes + pool.states.nbytes <= planned
            assert pool.states.nbytes > 0
