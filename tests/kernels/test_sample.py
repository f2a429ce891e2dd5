"""Sampling: the specification against transformers' warpers and exact distributions; the kernels
against the specification, token for token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hotset.kernels import sample_reference as spec
from hotset.kernels.sample import SampleBuffers, launch_sample, sample
from hotset.kernels.sample_reference import SampleParams
from kernels.support import DEVICE, EPS32

CPU = torch.device("cpu")
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02},
]


def params_of(rows: list[dict[str, Any]], *, device: torch.device = DEVICE) -> SampleParams:
    """Parameters of rows; temperature 1 and seed 0 unless given."""
    params = SampleParams.greedy(len(rows), device=device)
    params.temperature_B.fill_(1.0)
    for row, values in enumerate(rows):
        for name, value in values.items():
            getattr(params, f"{name}_B")[row] = value
    return params


def random_logits(num_rows: int, vocab: int, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def warpers(temperature: float = 1.0, **filters: Any) -> LogitsProcessorList:
    """The library's, in its order."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    for name, make in (
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if name in filters:
            chain.append(make(filters[name]))
    return chain


def is_borderline(score_V: torch.Tensor, filters: dict[str, Any]) -> torch.Tensor:
    """Tokens that FP32 rounding in the library's filters may drop or keep.

    Its cumulative sum of V probabilities errs by up to V eps, its probabilities by a few eps; 16
    more for exp and division.
    """
    p = torch.softmax(score_V.double(), 0)
    if "top_k" in filters:
        p[p < p.topk(min(filters["top_k"], len(p))).values[-1]] = 0
        p /= p.sum()
    above = torch.stack([p[p > value].sum() for value in p])
    slack = (len(p) + 16) * EPS32
    near_p = (above - filters["top_p"]).abs() < slack if "top_p" in filters else above > 2
    ratio = p / p.max()
    near_min = (ratio - filters["min_p"]).abs() < slack if "min_p" in filters else ratio > 2
    return near_p | near_min


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_the_kept_set_is_the_warpers(filters: dict[str, Any], temperature: float) -> None:
    undecided = 0
    for seed in range(3):
        x_1V = random_logits(1, 700, seed=seed)
        params = params_of([{"temperature": temperature, **filters}], device=CPU)
        score_1V = spec.scores(x_1V, params.temperature_B)
        kept = spec.keep(score_1V, params)[0]
        want = warpers(temperature, **filters)(torch.empty(1, 0).long(), x_1V.clone())
        near = is_borderline(score_1V[0], filters)
        undecided += int(near.sum())
        assert torch.equal(kept[~near], want[0].isfinite()[~near])
    assert undecided <= 3, "control: nearly all tokens are decided"


def test_ties_at_a_border_stay_together() -> None:
    x_1V = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])

    def kept(**filters: Any) -> list[bool]:
        return spec.keep(x_1V, params_of([filters], device=CPU))[0].tolist()

    assert kept(top_k=2) == [True, True, True, True, False]
    by_library = TopKLogitsWarper(2)(torch.empty(1, 0).long(), x_1V)[0].isfinite()
    assert kept(top_k=2) == by_library.tolist()
    # 0.44 lie above the equals and 0.94 with them: any of them is needed for 0.6, so all are kept.
    assert kept(top_p=0.6) == [True, True, True, True, False]
    assert kept(top_p=0.4) == [True, False, False, False, False]
    assert kept(min_p=1.0) == [True, False, False, False, False]


def test_philox_known_answers() -> None:
    """From the authors' own test vectors (Random123, kat_vectors, philox4x32-10)."""
    digits_of_pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    for (counter, key), want in (
        (((0,) * 4, (0,) * 2), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (((2**32 - 1,) * 4, (2**32 - 1,) * 2), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (digits_of_pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        words = spec.philox(*(tuple(torch.tensor([w]) for w in part) for part in (counter, key)))
        assert tuple(int(word) for word in words) == want


def test_weights_are_exponentials() -> None:
    x = torch.cat(
        [-torch.rand(20000, generator=torch.Generator().manual_seed(0)) * 27, -torch.ones(1)]
    )
    exact = torch.exp(x.double()) * 2.0**spec.WEIGHT_BITS
    got = spec.weights(x).double()
    # Reduced argument and polynomial err by about 1 eps of the result, the whole number by 1.
    bound = EPS32 * exact + 1
    assert ((got - exact).abs() <= bound).all()
    wrong = torch.exp(x.double() * (1 + 2.0**-20)) * 2.0**spec.WEIGHT_BITS
    assert ((got - wrong).abs() > bound).any(), "control"
    assert spec.weights(torch.tensor([0.0, -28.0, -200.0, -torch.inf])).tolist() == [2**40, 0, 0, 0]


def test_noise_is_gumbels() -> None:
    ends = torch.tensor([0, 1, 2**30 - 1, 2**30, 2**31, 2**32 - 1])
    words = torch.randint(2**32, (20000,), generator=torch.Generator().manual_seed(0))
    words = torch.cat([words, ends])
    u = (words.double() + 0.5) * 2.0**-32
    exact = -torch.log(-torch.log1p(-u))
    # Two logarithms of about 1 eps each; that of the inner one is relative to its value and so
    # absolute in the outer one, which is at most 22.9.
    bound = 2 * EPS32 * (1 + exact.abs())
    assert ((spec.gumbel(words).double() - exact).abs() <= bound).all()
    coarse = -torch.log(-torch.log(1 - u.float()))
    assert ((coarse.double() - exact).abs() > bound).any(), "control: from u in FP32"


def chi_square(tokens: torch.Tensor, p_V: torch.Tensor) -> tuple[float, float]:
    """(statistic, bound) of draws against probabilities.

    Laurent and Massart: chi-square with d degrees exceeds d + 2 sqrt(d t) + 2 t with probability
    at most exp(-t); t = 14 makes that one in a million.
    """
    kept = p_V > 0
    counts = torch.bincount(tokens, minlength=len(p_V)).double()
    assert not counts[~kept].any(), "a dropped token was drawn"
    expected = len(tokens) * p_V[kept]
    assert expected.min() > 5, "or the statistic is not chi-square"
    degrees, t = int(kept.sum()) - 1, 14.0
    statistic = float(((counts[kept] - expected).square() / expected).sum())
    return statistic, degrees + 2 * math.sqrt(degrees * t) + 2 * t


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
def test_draws_follow_the_filtered_softmax(filters: dict[str, Any]) -> None:
    """8000 positions of one seed, and as many seeds at one position."""
    x_1V, many = random_logits(1, 12, seed=3, scale=0.8), 8000
    values = {"temperature": 0.7, **filters}
    warped = warpers(**values)(torch.empty(1, 0).long(), x_1V.clone())
    p_V = torch.softmax(warped[0].double(), 0)
    hotter = torch.softmax(warped[0].double() * 0.5, 0)
    for varied in ("position", "seed"):
        params = params_of([values] * many, device=CPU)
        getattr(params, f"{varied}_B").copy_(torch.arange(many))
        tokens, finite = spec.sample(x_1V.expand(many, -1), params)
        assert finite.all()
        statistic, bound = chi_square(tokens, p_V)
        assert statistic < bound
        statistic, bound = chi_square(tokens, hotter)
        assert statistic > bound, "control: another temperature is noticed"


def mixed_rows() -> list[dict[str, Any]]:
    return [
        {"temperature": 0.0, "top_k": 3},
        {},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 3.0, "top_p": 0.5, "min_p": 0.001},
        {"temperature": 1.5, "top_k": 1},
        {"temperature": 0.8, "min_p": 0.3, "position": 2**40 + 5},
        {"temperature": 1e-38, "top_p": 0.9, "seed": 2**62 + 12345},
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 37, 1024, 2500])
def test_the_kernels_give_the_specifications_tokens(dtype: torch.dtype, vocab: int) -> None:
    """Twice with one set of buffers: what a call leaves there must not reach the next."""
    rows = mixed_rows() if vocab == 2500 else mixed_rows()[1:4]
    buffers = SampleBuffers.make(len(rows), vocab, device=DEVICE)
    params = params_of(rows)
    for seed in range(2):
        x_BV = random_logits(len(rows), vocab, seed=seed).to(dtype).to(DEVICE)
        params.position_B.add_(1)
        want = spec.sample(x_BV, params)
        got = launch_sample(x_BV, params, buffers=buffers)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert got[0].data_ptr() == buffers.token_B.data_ptr()
        assert not buffers.count_BK.any() and not buffers.used_BK.any()


def test_a_dropped_favourite_is_replaced() -> None:
    """Flat rows, of which filters keep little: the best token of all is mostly not kept."""
    rows = [{"top_k": 4}, {"top_p": 0.02}, {"min_p": 0.8}]
    x_BV = random_logits(3, 2100, scale=0.3).bfloat16().to(DEVICE)
    params = params_of(rows)
    want, _ = spec.sample(x_BV, params)
    unfiltered, _ = spec.sample(x_BV, params_of([{}] * 3))
    assert (want != unfiltered).all(), "control"
    assert torch.equal(launch_sample(x_BV, params)[0], want)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # huge numbers below
def test_special_values() -> None:
    """Zeros of both signs, equals, subnormals, the largest number; rows wider than their stride."""
    tiny, huge = 2.0**-130, 3.3e38
    rows = torch.tensor(
        [
            [-0.0, 0.0, -1.0, -0.0],
            [1.0, 5.0, 5.0, 5.0],
            [tiny, -tiny, 0.0, tiny],
            [huge, huge, -huge, 0.0],
        ]
    )
    wide = torch.full((4, 9), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 2:6] = rows.bfloat16()
    x_BV = wide[:, 2:6]
    for values in ({"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.7}):
        params = params_of([values] * 4)
        want = spec.sample(x_BV, params)
        got = launch_sample(x_BV, params)
        assert torch.equal(got[0], want[0]) and got[1].all() and want[1].all()
        if values == {"temperature": 0.0}:
            assert want[0].tolist() == [0, 1, 0, 0], "the lowest id among equals"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite(bad: float) -> None:
    x_BV = random_logits(3, 1500).bfloat16().to(DEVICE)
    x_BV[1, 1234] = bad
    params = params_of([{"top_k": 9, "top_p": 0.9}] * 2 + [{"temperature": 0.0}])
    clean, _ = spec.sample(x_BV[::2], params)
    buffers = SampleBuffers.make(3, 1500, device=DEVICE)
    for token_B, finite_B in (
        spec.sample(x_BV, params),
        launch_sample(x_BV, params, buffers=buffers),
    ):
        assert finite_B.tolist() == [True, False, True]
        assert token_B[1] == 0, "an id that can be looked up"
        assert token_B[0] == clean[0]
    assert not buffers.count_BK.any() and not buffers.used_BK.any()


def test_a_row_depends_on_nothing_but_itself() -> None:
    """CC-16, in the draw: alone, among others, in another place, in another dtype."""
    rows = [dict(values, seed=7 * n, position=n) for n, values in enumerate(mixed_rows())]
    x_BV = random_logits(len(rows), 300).bfloat16().to(DEVICE)
    whole, _ = launch_sample(x_BV, params_of(rows))
    order = [3, 5, 1]
    some, _ = launch_sample(x_BV[order], params_of([rows[n] for n in order]))
    assert torch.equal(some, whole[order])
    for n in (2, 3):
        alone, _ = sample(x_BV[n : n + 1].float(), params_of(rows[n : n + 1]))
        assert torch.equal(alone, whole[n : n + 1])


def test_seed_and_position_decide() -> None:
    x_BV = torch.zeros(1, 5000).expand(400, -1)
    params = params_of([{}] * 400, device=CPU)
    params.seed_B.copy_(torch.arange(400) // 20)
    params.position_B.copy_(torch.arange(400) % 20)
    first, _ = spec.sample(x_BV, params)
    # 400 draws of 5000 equals: about 400^2 / 2 / 5000 = 16 pairs agree.
    assert 340 < len(first.unique()) < 400
    assert torch.equal(spec.sample(x_BV, params)[0], first)
    params.seed_B.add_(1 << 40)
    assert (spec.sample(x_BV, params)[0] != first).sum() > 390


def test_results_lie_where_they_are_wanted() -> None:
    buffers = SampleBuffers.make(4, 50, device=DEVICE)
    x_BV = random_logits(2, 50).to(DEVICE)
    for logits in (x_BV, x_BV.bfloat16()):
        token_B, finite_B = sample(logits, params_of([{}] * 4), buffers=buffers)
        assert token_B.data_ptr() == buffers.token_B.data_ptr() and len(token_B) == 2
        assert finite_B.data_ptr() == buffers.finite_B.data_ptr() and finite_B.all()
        assert token_B.dtype == torch.int64
