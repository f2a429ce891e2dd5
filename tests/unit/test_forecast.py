"""The forecast against its formula, computed the slow way; what the policy makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from routing import make_trace, skewed_ids

from hotset.core import forecast as module
from hotset.core.errors import ConfigError
from hotset.core.forecast import HORIZON, PENALTY, Forecast
from hotset.core.placement import Placement
from hotset.core.policy import ForecastPolicy
from hotset.core.simulator import Condition, simulate
from hotset.core.slot_pools import SlotPools

E, L, HALF_LIVES = 6, 2, (2.0, 8.0, 64.0)


def one_hot(ids: np.ndarray) -> np.ndarray:
    x = np.zeros((*ids.shape[:2], E))
    np.put_along_axis(x, ids, 1, axis=2)
    return x


def recent(x: np.ndarray, half_life: float) -> np.ndarray:
    """u before each token, [T, L, E]."""
    decay, u = 2 ** (-1 / half_life), np.zeros((len(x) + 1, *x.shape[1:]))
    for t in range(len(x)):
        u[t + 1] = decay * u[t] + (1 - decay) * x[t]
    return u[:-1]


def to_come(x: np.ndarray, horizon: float) -> np.ndarray:
    """y of each token, [T, L, E]."""
    keep, y = 2 ** (-1 / horizon), np.zeros_like(x)
    for t in range(len(x) - 2, -1, -1):
        y[t] = keep * y[t + 1] + (1 - keep) * x[t + 1]
    return y


def slow_fit(x: np.ndarray, horizon: float):
    """(a, b, c) and per layer W and the constant, from the module's docstring."""
    u, y, mean = [recent(x, s) for s in HALF_LIVES], to_come(x, horizon), x.mean(axis=0)
    columns = [*u, x, np.broadcast_to(mean, x.shape)]
    own = np.linalg.lstsq(np.stack([c.ravel() for c in columns], axis=1), y.ravel(), rcond=None)[0]
    left = y - sum(weight * column for weight, column in zip(own, columns, strict=True))
    shared, constant = [], []
    for layer in range(L):
        features = np.concatenate([u[0][:, layer], u[1][:, layer]], axis=1)
        centre, scale = features.mean(axis=0), features.std(axis=0)
        z = (features - centre) / scale
        target = left[:, layer]
        weight = np.linalg.solve(z.T @ z + PENALTY * np.eye(2 * E), z.T @ target) / scale[:, None]
        shared.append(weight)
        constant.append(own[4] * mean[layer] - centre @ weight)
    return own, np.stack(shared), np.stack(constant)


def slow_forecast(x: np.ndarray, horizon: float = HORIZON) -> np.ndarray:
    """f(t) without the use by t itself, [T, L, E]."""
    own, shared, constant = slow_fit(x, horizon)
    u = [recent(x, s) for s in HALF_LIVES]
    f = constant + sum(weight * column for weight, column in zip(own, u, strict=False))
    for index in range(2):
        f += np.einsum("tle,lef->tlf", u[index], shared[:, index * E : (index + 1) * E])
    return f


def test_fit_and_policy_are_the_formula():
    """Features are float32 sums of up to 600 terms near 1: errors up to 600 eps, 7e-5."""
    ids = skewed_ids(num_tokens=600, num_layers=L, num_experts=E, top_k=2, seed=4)
    fitted = Forecast.fit(make_trace([ids[:200], ids[200:]], num_experts=E))
    x = one_hot(ids)
    policy = ForecastPolicy([E] * L, forecast=fitted)
    found = np.empty_like(x)
    for token, step in enumerate(ids):
        found[token] = policy._standing()[0] - 1.0
        policy.observe(step)
    want = slow_forecast(x)
    np.testing.assert_allclose(found, want, atol=7e-5)
    np.testing.assert_allclose(fitted.use_L, slow_fit(x, HORIZON)[0][3], atol=7e-5)
    # Control: a horizon of 3 tokens instead of 4 is told apart.
    assert np.abs(found - slow_forecast(x, 3.0)).max() > 1e-3


def test_layers_in_groups_are_layers_together(monkeypatch):
    """(a), b and c are shared within a group only; W and the rest are per layer."""
    ids = skewed_ids(num_tokens=300, num_layers=1, num_experts=E, top_k=2, seed=4)
    twice = make_trace([np.concatenate([ids, ids], axis=1)], num_experts=E)
    together = Forecast.fit(twice)
    monkeypatch.setattr(module, "_GROUP_BYTES", 1)
    apart = Forecast.fit(twice)
    for name, array in together.to_arrays().items():
        np.testing.assert_allclose(array, apart.to_arrays()[name], atol=1e-6)


def test_many_and_repeated_ids_of_a_step():
    """Rows are summed for few ids and multiplied for many; an expert counts once."""
    ids = skewed_ids(num_tokens=200, num_layers=1, num_experts=64, top_k=2, seed=0)
    fitted = Forecast.fit(make_trace([ids], num_experts=64))
    few, many = (ForecastPolicy([64], forecast=fitted) for _ in range(2))
    few.observe(np.array([[3, 9, 11]]))
    many.observe(np.array([[9, 3, -1, 64, *[11] * 30]]))
    # Sums of three float32 values in another order.
    for got, want in zip(many._standing(), few._standing(), strict=True):
        np.testing.assert_allclose(got, want, rtol=3 * np.finfo(np.float32).eps)


def test_a_prompt_counts_like_its_tokens():
    ids = skewed_ids(num_tokens=200, num_layers=1, num_experts=8, top_k=2, seed=0)
    fitted = Forecast.fit(make_trace([ids], num_experts=8))
    stepped, read = (ForecastPolicy([8], forecast=fitted) for _ in range(2))
    for policy in (stepped, read):
        policy.observe(np.array([[5, 6]]))
    prompt_TK = np.random.default_rng(0).integers(-1, 9, (100, 2))
    for ids_K in prompt_TK:
        stepped.observe(ids_K[None])
    read.read(0, prompt_TK)
    # 100 float32 additions.
    got, want = read._standing()[0], stepped._standing()[0]
    np.testing.assert_allclose(got, want, rtol=100 * np.finfo(np.float32).eps)


def test_it_knows_what_follows_what():
    """Experts come in a fixed order of 12: no average of the past can tell which is next."""
    order = np.random.default_rng(0).permutation(12)
    ids = np.tile(order, 2000)[:, None, None]
    train, test = (
        make_trace([ids[:20_000]], num_experts=12),
        make_trace([ids[:600]], num_experts=12),
    )
    conditions = [Condition("forecast", 0.5), Condition("lru", 0.5), Condition("half-life", 0.5, 8)]
    rates = [r.hit_rate for r in simulate(test, conditions, forecast=Forecast.fit(train))]
    assert rates[0] > max(rates[1:]) + 0.05


def test_few_tokens_leave_the_own_forecast():
    """Of N tokens a weight per standard deviation is at most N / PENALTY, as residuals are below 1.

    Ridge: |W| <= |Z' r| / PENALTY, and each element of Z' r is at most N for unit-variance Z.
    """
    num_tokens = 60
    ids = skewed_ids(num_tokens=num_tokens, num_layers=L, num_experts=E, top_k=2, seed=1, skew=2.0)
    own = slow_fit(one_hot(ids), HORIZON)[0]
    fitted = Forecast.fit(make_trace([ids], num_experts=E)).shared_LEF.reshape(L, E, 2, E)
    u = [recent(one_hot(ids), s).std(axis=0) for s in HALF_LIVES[:2]]
    for index, half_life in enumerate(HALF_LIVES[:2]):
        weight = fitted[:, :, index] / (1 - 2 ** (-1 / half_life)) - own[index] * np.eye(E)
        scaled = np.abs(weight) * u[index][:, :, None]
        assert (scaled <= num_tokens / PENALTY).all()
        assert scaled.max() > 0


def test_another_shape_is_refused():
    ids = skewed_ids(num_tokens=20, num_layers=2, num_experts=8, top_k=2, seed=0)
    fitted = Forecast.fit(make_trace([ids], num_experts=8))
    with pytest.raises(ConfigError, match="for 2 layers of 8 experts, the model has 1 of 8"):
        ForecastPolicy([8], forecast=fitted)
    policy = ForecastPolicy([8, 8], forecast=fitted)
    placement = Placement.from_residents(
        SlotPools.uniform([8, 8], [3, 3]), policy.initial(SlotPools.uniform([8, 8], [3, 3]))
    )
    wishes = policy.wishes(placement)
    assert sorted(wishes.victims_LV[0, :3]) == [0, 1, 2]
    assert (wishes.victims_LV[:, 3:] == -1).all()
