"""The policy that follows a fitted forecast: who is likely to be used soon keeps its slot.

Knows the weights of `core.forecast` and recent uses; refuses to fit anything. Each use adds one row
of weights to the layer's forecasts, and so a step costs K rows, not a product of matrices.

Letters: L MoE layers, E experts, N routed ids of a layer in one step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotset.core.errors import ConfigError
from hotset.core.forecast import OWN_HALF_LIFE, SHARED_HALF_LIVES, Forecast
from hotset.core.policy.adaptive import ScoredPolicy
from hotset.core.policy.base import NUM_VICTIMS, FloatArray, faded_uses
from hotset.core.slot_pools import IntArray

_OFFSET = 1.0
"""Added to forecasts, of which some are slightly negative: scores are at least 0."""

_FLOOR = 1e-30
"""Added to fading sums at every step, because denormal numbers are slow."""


class ForecastPolicy(ScoredPolicy):
    """Score = forecast of the use in the next few tokens (see `core.forecast` for the formula).

    A missing expert outranks a resident if its forecast, with the use that made it missing, is
    higher.

    Args:
        forecast: fitted to this model.

    Raises:
        ConfigError: the forecast has another shape.
    """

    name = "forecast"

    def __init__(
        self,
        num_experts: Sequence[int],
        *,
        forecast: Forecast,
        prior_LE: FloatArray | None = None,
        num_victims: int = NUM_VICTIMS,
    ) -> None:
        super().__init__(num_experts, prior_LE=prior_LE, num_victims=num_victims)
        num_layers, width = self.shape
        if forecast.constant_LE.shape != self.shape:
            raise ConfigError(
                f"the forecast is for {forecast.constant_LE.shape[0]} layers of "
                f"{forecast.constant_LE.shape[1]} experts, the model has {num_layers} of {width}"
            )
        # One row more, of zeros, for padded and repeated ids.
        rows = forecast.shared_LEF.reshape(num_layers * width, -1)
        self._rows = np.concatenate([rows, np.zeros_like(rows[:1])])
        self._weights = self._rows[:-1].reshape(num_layers, width, -1)
        self._fast_decay = np.repeat(np.exp2(-1 / np.array(SHARED_HALF_LIVES)), width)
        self._fast_decay_32 = self._fast_decay.astype(np.float32)
        self._fast = np.zeros((num_layers, self._rows.shape[1]), dtype=np.float32)
        self._slow_decay = 2 ** (-1 / OWN_HALF_LIFE)
        self._slow_rise = forecast.own_L[:, None]
        self._use = forecast.use_L[:, None]
        self._constant = forecast.constant_LE + _OFFSET
        self._total = np.empty(self.shape)

    def observe(self, ids_LN: IntArray) -> None:
        self._fast *= self._fast_decay_32
        self._fast += self._raise(ids_LN)
        self._score *= self._slow_decay
        self._score += _FLOOR
        self._cells[self._cells_of(ids_LN)] += self._slow_rise
        self._cells[-1] = 0.0

    def _raise(self, ids_LN: IntArray) -> NDArray[np.float32]:
        """What the distinct experts of a step add to the forecasts of their layers, [L, 2 E]."""
        cells = np.sort(self._cells_of(ids_LN), axis=1)
        cells[:, 1:][cells[:, 1:] == cells[:, :-1]] = self._cells.size - 1
        if cells.shape[1] * 4 < self.shape[1]:
            summed: NDArray[np.float32] = self._rows.take(cells, axis=0).sum(axis=1)
            return summed
        used = np.zeros(self._cells.size, dtype=np.float32)
        used[cells] = 1.0
        product: NDArray[np.float32] = used[:-1].reshape(self.shape)[:, None] @ self._weights
        return product[:, 0]

    def read(self, layer: int, ids_TK: IntArray) -> None:
        num_tokens, width = len(ids_TK), self.shape[1]
        for index, half_life in enumerate(SHARED_HALF_LIVES):
            part = slice(index * width, (index + 1) * width)
            decay = 2 ** (-1 / half_life)
            uses = faded_uses(ids_TK, width, decay).astype(np.float32)
            faded = np.float32(decay**num_tokens) * self._fast[layer, part]
            self._fast[layer, part] = faded + uses @ self._weights[layer][:, part]
        self._score[layer] *= self._slow_decay**num_tokens
        own = faded_uses(ids_TK, width, self._slow_decay)
        self._score[layer] += self._slow_rise[layer] * own

    def _standing(self) -> tuple[FloatArray, FloatArray]:
        width = self.shape[1]
        np.add(self._constant, self._score, out=self._total)
        for first in range(0, self._fast.shape[1], width):
            self._total += self._fast[:, first : first + width]
        return np.maximum(self._total, 0.0, out=self._total), self._use
