"""Decode attention on a GPU at real sizes: right, blind to placement, capturable, its pool too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotset.core.geometry import AttentionLayer
from hotset.kernels.attention import AttentionKernels
from hotset.runtime.kv_cache import DecodeBatch, KVCache
from hotset.runtime.kv_pool import KVPool
from kernels.attention_support import Shape, decode, lay_out, make_rows, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TRITON = AttentionKernels("triton")
BF16 = torch.bfloat16
SHAPES = {
    "Qwen3-30B-A3B": Shape((1, 1000, 0, 8192), 32, 4, 128, 128, dtype=BF16, block_tokens=32),
    "gpt-oss, full": Shape((5000, 77), 64, 8, 64, 64, sinks=True, dtype=BF16, block_tokens=32),
    "gpt-oss, window": Shape(
        (127, 128, 129, 5000), 64, 8, 64, 64, window=128, sinks=True, dtype=BF16, block_tokens=32
    ),
    "GLM-4.5": Shape((4097,), 96, 8, 128, 128, dtype=BF16, block_tokens=32),
    "MiMo-V2-Flash": Shape((3000,), 64, 4, 192, 128, dtype=BF16, block_tokens=32),
    "head dim 256": Shape((3000, 1), 16, 2, 256, 256, dtype=BF16, block_tokens=32),
    "head dim 512": Shape((700,), 32, 1, 512, 512, dtype=BF16, block_tokens=32),
    "group 12, capped": Shape((2100,), 24, 2, 80, 80, softcap=5.0, dtype=torch.float16),
    "every head its own": Shape((2100,), 16, 16, 96, 96, dtype=BF16, block_tokens=32),
    "fp32": Shape((2100, 31), 8, 2, 128, 128, block_tokens=32),
    "32k": Shape((32768,), 32, 4, 128, 128, dtype=BF16, block_tokens=32),
}


def shape(name: str) -> Shape:
    """With scores of order 1."""
    return replace(SHAPES[name], scale=SHAPES[name].key_dim ** -0.5)


@pytest.mark.parametrize("name", SHAPES)
def test_within_the_derived_bound(name: str) -> None:
    rows = make_rows(shape(name))
    oracle(rows).check(decode(TRITON, rows, lay_out(rows)))


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "gpt-oss, window", "MiMo-V2-Flash", "fp32"])
def test_bits_are_of_the_row_alone(name: str) -> None:
    rows = make_rows(shape(name))
    expected = decode(TRITON, rows, lay_out(rows))
    variants = [rows, rows.with_shape(spare_blocks=900), rows.with_shape(block_tokens=16)]
    for seed, other in enumerate(variants, start=1):
        assert torch.equal(decode(TRITON, other, lay_out(other, seed=seed)), expected)
    for row, length in enumerate(rows.shape.lengths):
        if length:
            alone = rows.only(row)
            assert torch.equal(decode(TRITON, alone, lay_out(alone)), expected[row : row + 1])
    rows.q_BQD[-1] += 0.5  # control
    assert not torch.equal(decode(TRITON, rows, lay_out(rows)), expected)


FULL = AttentionLayer("full", 0, 32, 4, 128, 128, None)
WINDOW = AttentionLayer("window", 1, 64, 8, 64, 64, 128)


class Layers:
    """Attention of a model with two layers, over rows of random keys and values."""

    def __init__(self, batch_size: int) -> None:
        self.pool = KVPool(
            (FULL, WINDOW),
            num_rows=batch_size,
            context_tokens=1024,
            dtype=BF16,
            device=torch.device("cuda"),
            poison=True,
        )
        self.batch = DecodeBatch(self.pool, batch_size, kernels=TRITON)
        self.cache = KVCache(self.batch)
        self.sinks_Q = {0: None, 1: torch.linspace(-2, 2, 64, dtype=BF16, device="cuda")}
        source = torch.Generator("cuda").manual_seed(0)
        self.inputs = {}
        for layer in (FULL, WINDOW):
            heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
            self.inputs[layer.index] = [
                torch.randn(batch_size, n, 1, layer.key_dim, generator=source, device="cuda").to(
                    BF16
                )
                for n in heads
            ]

    def new_inputs(self, seed: int) -> None:
        source = torch.Generator("cuda").manual_seed(seed)
        for tensors in self.inputs.values():
            for tensor in tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=source, device="cuda"))

    def step(self) -> list[torch.Tensor]:
        """What the device does in one step: lengths, writes, attention."""
        self.batch.advance()
        out = []
        for index, (query, key, value) in self.inputs.items():
            view, _ = self.cache.update(key, value, index)
            sinks_Q = self.sinks_Q[index]
            out.append(view.attend(query, scale=0.1, softcap=None, sinks_Q=sinks_Q)[:, 0])
        return out


def open_rows(layers: Layers, lengths: list[int]) -> list[int]:
    """Rows that have so many tokens, written one by one."""
    rows = []
    for length in lengths:
        rows.append(layers.pool.open())
        layers.pool.reserve(rows[-1], 1024)
        layers.batch.assign([rows[-1]])
        for token in range(length):
            layers.new_inputs(1000 * len(rows) + token)
            layers.batch.begin_step()
            layers.step()
    return rows


def test_a_captured_step_replays_as_lengths_advance() -> None:
    """Across borders of blocks, of the window's ring and of tiles, with padding, bit for bit."""
    num_steps, lengths = 80, [1, 90, 250]
    eager, captured = Layers(4), Layers(4)
    rows = [open_rows(layers, lengths) for layers in (eager, captured)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        captured.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for layers, (first, second, third) in zip((eager, captured), rows, strict=True):
        layers.batch.assign([third, None, first, second])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # runs nothing, so lengths stay
        out = captured.step()
    for step in range(num_steps):
        for layers in (eager, captured):
            layers.new_inputs(step)
            layers.batch.begin_step()
        expected = eager.step()
        graph.replay()
        assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1]), step
        assert all((x[1] == 0).all() and x.isfinite().all() for x in out)
    assert captured.batch.lengths_B.tolist() == [330, 0, 81, 170]


def test_a_captured_step_follows_a_new_assignment() -> None:
    """Other rows in the same graph: block tables and lengths are data."""
    layers, alone = Layers(2), Layers(2)
    rows = open_rows(layers, [40, 300])
    open_rows(alone, [40, 300])
    graph = torch.cuda.CUDAGraph()
    layers.batch.assign([rows[0], rows[1]])
    with torch.cuda.graph(graph):
        out = layers.step()
    for places in ([rows[1], rows[0]], [None, rows[1]], [rows[0], None]):
        for which in (layers, alone):
            which.batch.assign(places)
            which.new_inputs(len(places))
            which.batch.begin_step()
        graph.replay()
        for got, expected in zip(out, alone.step(), strict=True):
            assert torch.equal(got, expected)
