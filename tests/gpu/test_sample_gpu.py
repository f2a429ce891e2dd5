"""Sampling on a GPU at real vocabularies: the CPU's tokens, captured, and without waiting."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from hotset.kernels import sample_reference as spec
from hotset.kernels.sample import SampleBuffers, sample
from hotset.kernels.sample_reference import SampleParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_ROWS = 8
VOCABS = pytest.mark.parametrize("vocab", [151_936, 248_320])


def make_params(seed: int = 0) -> SampleParams:
    """Greedy, unfiltered, each filter alone, all together, and filters that keep very little."""
    params = SampleParams.greedy(NUM_ROWS, device=CPU)
    params.temperature_B.copy_(torch.tensor([0.0, 1.0, 0.6, 0.8, 1.0, 0.7, 2.0, 1.5]))
    params.top_k_B.copy_(torch.tensor([0, 0, 20, 0, 0, 40, 3, 100_000]))
    params.top_p_B.copy_(torch.tensor([1.0, 1.0, 1.0, 0.9, 1.0, 0.95, 0.1, 0.999]))
    params.min_p_B.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.01, 0.0, 0.0]))
    params.seed_B.copy_(torch.arange(NUM_ROWS) * 0x123456789ABC + seed)
    params.position_B.copy_(torch.arange(NUM_ROWS) * 1000)
    return params


def moved(params: SampleParams) -> SampleParams:
    return SampleParams(*(getattr(params, field.name).to(CUDA) for field in fields(params)))


def make_logits(vocab: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Each row peaked in its own way."""
    source = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.2, 5, NUM_ROWS)[:, None]
    return (torch.randn(NUM_ROWS, vocab, generator=source) * scale).to(dtype)


@VOCABS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gpu_draws_the_cpus_tokens(dtype: torch.dtype, vocab: int) -> None:
    params = make_params()
    on_gpu = moved(params)
    buffers = SampleBuffers.make(NUM_ROWS, vocab, device=CUDA)
    for seed in range(2):
        logits_BV = make_logits(vocab, dtype, seed=seed)
        for _ in range(2):
            want, _ = spec.sample(logits_BV, params)
            got, finite = sample(logits_BV.to(CUDA), on_gpu, buffers=buffers)
            assert torch.equal(got.cpu(), want) and finite.all()
            params.position_B.add_(1)
            on_gpu.position_B.add_(1)
        assert not buffers.count_BK.any() and not buffers.used_BK.any()


def test_scores_weights_and_noise_have_the_cpus_bits() -> None:
    """The parts, of which a token shows little."""
    params = make_params()
    x_BV = make_logits(151_936, torch.float32)
    for part in (
        lambda x, p: spec.scores(x, p.temperature_B),
        lambda x, p: spec.weights(-x.abs() * 8),
        lambda x, p: spec.gumbel(
            spec.philox_words(p.seed_B, p.position_B, torch.arange(x.shape[1], device=x.device))
        ),
        lambda x, p: spec.keep(spec.scores(x, p.temperature_B), p),
    ):
        assert torch.equal(part(x_BV.to(CUDA), moved(params)).cpu(), part(x_BV, params))


@VOCABS
def test_a_captured_step_follows_its_parameters(vocab: int) -> None:
    params, buffers = moved(make_params()), SampleBuffers.make(NUM_ROWS, vocab, device=CUDA)
    logits_BV = make_logits(vocab, torch.bfloat16).to(CUDA)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        drawn = sample(logits_BV, params, buffers=buffers)
        params.position_B.add_(1)
        return drawn

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_B, finite_B = step()
    for seed in range(5):
        logits_BV.copy_(make_logits(vocab, torch.bfloat16, seed=seed))
        for field in fields(params):
            getattr(params, field.name).copy_(getattr(make_params(seed), field.name))
        want, _ = spec.sample(logits_BV.cpu(), make_params(seed))
        graph.replay()
        assert torch.equal(token_B.cpu(), want) and finite_B.all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    params, logits_BV = moved(make_params()), make_logits(151_936, torch.bfloat16).to(CUDA)
    whole, _ = sample(logits_BV, params)
    for row in range(NUM_ROWS):
        own = SampleParams(*(getattr(params, f.name)[row : row + 1] for f in fields(params)))
        alone, _ = sample(logits_BV[row : row + 1], own)
        assert torch.equal(alone[0], whole[row])


def test_a_row_that_is_not_finite_says_so() -> None:
    logits_BV = make_logits(151_936, torch.bfloat16).to(CUDA)
    clean, _ = sample(logits_BV, moved(make_params()))
    logits_BV[2, 150_000] = torch.nan
    token_B, finite_B = sample(logits_BV, moved(make_params()))
    assert finite_B.tolist() == [row != 2 for row in range(NUM_ROWS)]
    assert token_B[2] == 0
    others = torch.arange(NUM_ROWS, device=CUDA) != 2
    assert torch.equal(token_B[others], clean[others])
