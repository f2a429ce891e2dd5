"""Policies that follow the text: half-life and LRU, both a score per expert.

A resident with a low score is given up for a missing expert whose score, with the use that made it
missing, would be higher. Work per step is vectorised over layers and never sorts a whole layer.

Letters: L MoE layers, E experts, N routed ids of a layer in one step, V victims.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from hotset.core.errors import ConfigError
from hotset.core.placement import Placement
from hotset.core.policy.base import NUM_VICTIMS, FloatArray, Policy, Wishes, faded_uses
from hotset.core.slot_pools import BoolArray, IntArray

DEFAULT_HALF_LIFE = 16.0
"""Steps. The best of gpt-oss-20b is 8 to 16, of a 54M model 16 (chat) to 128 (prose)."""

DEFAULT_PRIOR_WEIGHT = 0.1
"""A profile of other text gains 0.001 at 0.1 and loses 0.01 at 1; one of the same text gains
0.004 at 0.2 (docs/log.md)."""

MIN_HALF_LIFE = 0.1

_ID_BITS = 12
_ID_MASK = (1 << _ID_BITS) - 1
MAX_EXPERTS = _ID_MASK
"""Of a layer: an id lies in the low bits of a score."""

_NOT_A_VICTIM = np.iinfo(np.int64).max
_TOURNAMENT_FROM = 512  # experts, most of them able: 60 us against 140 for 48 layers
_COLUMNS = 64
_NARROW = 64  # experts
_REBASE_BITS = 400.0  # half of what a float64 exponent holds, so that a ratio never overflows


class ScoredPolicy(Policy):
    """Base of the policies that keep one score of at least 0 per expert.

    `_score` is [L, E] float64, a view of a flat buffer whose last cell swallows padded ids.
    """

    def __init__(
        self,
        num_experts: Sequence[int],
        *,
        prior_LE: FloatArray | None = None,
        num_victims: int = NUM_VICTIMS,
    ) -> None:
        super().__init__(num_experts, prior_LE=prior_LE, num_victims=num_victims)
        num_layers, width = self.shape
        if width > MAX_EXPERTS:
            raise ConfigError(f"{width} experts in a layer, at most {MAX_EXPERTS} are supported")
        self._cells = np.zeros(num_layers * width + 1)
        self._score = self._cells[:-1].reshape(self.shape)
        self._row = np.arange(num_layers, dtype=np.int64)[:, None] * width
        # Scratch: fresh arrays of this size cost page faults at every step.
        self._key = np.empty(self.shape, dtype=np.int64)
        self._used = np.empty(self.shape)
        self._outranked = np.empty((num_victims, num_layers, width), dtype=np.bool_)

    @abstractmethod
    def _standing(self) -> tuple[FloatArray, FloatArray | None]:
        """Scores as they will be in the next step, [L, E], and what one use adds, [L, 1].

        `None` for the second: whoever is used outranks every resident.
        """

    def scores(self, layer: int) -> FloatArray:
        return self._standing()[0][layer, : self.num_experts[layer]]

    def wishes(self, placement: Placement, *, out: Wishes | None = None) -> Wishes:
        wishes = self._buffers(out)
        score_LE, bump_L1 = self._standing()
        width = self.shape[1]
        able = np.greater(placement.resident[:, :width], placement.pinned[:, :width])
        victims = lowest(score_LE, able, self.num_victims, scratch_LE=self._key)
        value = score_LE.take(victims + self._row, mode="clip")
        value[victims < 0] = np.inf
        if placement.num_spare:
            victims, value = _offer_spares(placement, victims, value)
        wishes.victims_LV[:] = victims
        if bump_L1 is None or width > _NARROW:
            wishes.admit_LE[:] = np.add.reduce(victims >= 0, axis=1, dtype=np.int32)[:, None]
        if bump_L1 is not None:
            self._count_outranked(score_LE, bump_L1, value, wishes)
        return wishes

    def _count_outranked(
        self, score_LE: FloatArray, bump_L1: FloatArray, value_LV: FloatArray, wishes: Wishes
    ) -> None:
        """Sets `admit`; in wide layers only where not every expert outranks every victim.

        Scores are at least 0, so one use outranks victims below its own worth, whoever is used: in
        wide layers that is most of them. In narrow ones looking for those costs more than it saves.
        """
        num = len(score_LE)
        rows: slice | IntArray = slice(None)
        if score_LE.shape[1] > _NARROW:
            is_contested = ((value_LV >= bump_L1) & (value_LV < np.inf)).any(axis=1)
            contested = np.flatnonzero(is_contested)
            num = len(contested)
            if num == 0:
                return
            rows = slice(None) if num == len(score_LE) else contested
        used, outranked = self._used[:num], self._outranked[:, :num]
        np.add(score_LE[rows], bump_L1[rows], out=used)
        np.greater(used, value_LV[rows].T[:, :, None], out=outranked)
        wishes.admit_LE[rows] = np.add.reduce(outranked.view(np.int8), axis=0, dtype=np.int8)

    def _cells_of(self, ids_LN: IntArray) -> IntArray:
        """Flat cells of routed ids; the last cell for padded ones."""
        valid = (ids_LN >= 0) & (ids_LN < self.num_experts[:, None])
        return np.where(valid, ids_LN + self._row, self._cells.size - 1)


class HalfLife(ScoredPolicy):
    """Score = prior + uses, of which each counts half after `half_life` steps.

    With d = 2^(-1/half_life), u <- d u + [used in this step]. A steady use of p per step tends to
    u = p / (1 - d), and so the prior is `prior_weight * prior_LE / (1 - d)`: at weight 1 the
    profile counts as much as the recent past. A missing expert outranks a resident if its score
    plus 1 is higher.

    Args:
        half_life: steps, at least 0.1; one number or one per layer. `inf` never forgets: with a
            prior the score is the prior alone (the static hot set), without one the count of uses.
        prior_weight: see above; 0 uses the prior for the initial residents only.

    Raises:
        ConfigError: a half-life below 0.1 or not a number, a negative weight.
    """

    name = "half-life"

    def __init__(
        self,
        num_experts: Sequence[int],
        *,
        half_life: float | FloatArray = DEFAULT_HALF_LIFE,
        prior_LE: FloatArray | None = None,
        prior_weight: float = DEFAULT_PRIOR_WEIGHT,
        num_victims: int = NUM_VICTIMS,
    ) -> None:
        super().__init__(num_experts, prior_LE=prior_LE, num_victims=num_victims)
        half_life_L1 = np.broadcast_to(
            np.asarray(half_life, dtype=np.float64).reshape(-1, 1), (self.shape[0], 1)
        )
        if not (half_life_L1 >= MIN_HALF_LIFE).all():
            raise ConfigError(
                f"`half_life` is {float(half_life_L1.min()):g}, the least is {MIN_HALF_LIFE} steps",
                hint="for the last use alone, take policy `lru`",
                option="half_life",
            )
        if not 0 <= prior_weight < math.inf:  # so that NaN fails too
            raise ConfigError(
                f"`prior_weight` is {prior_weight:g}, it must be a number from 0 on",
                option="prior_weight",
            )
        self.half_life_L = half_life_L1[:, 0].copy()
        self._decay = np.exp2(-1.0 / half_life_L1)
        # Instead of shrinking all scores, the worth of a use grows; ranks are the same.
        self._worth = np.ones_like(self._decay)
        self._steps, self._rebase_steps = 0, _REBASE_BITS * float(half_life_L1.min())
        self._prior = self._scale_prior(half_life_L1, prior_weight)

    def _scale_prior(self, half_life_L1: FloatArray, prior_weight: float) -> FloatArray | None:
        self._learns = np.ones_like(half_life_L1)
        if self.prior_LE is None:
            return None
        endless = np.isinf(half_life_L1)
        self._learns[endless] = 0.0
        if prior_weight == 0 and not endless.any():
            return None
        steady = prior_weight / np.where(endless, 1.0, 1.0 - self._decay)
        return self.prior_LE * np.where(endless, 1.0, steady)

    def observe(self, ids_LN: IntArray) -> None:
        self._worth /= self._decay
        # Assignment, not accumulation: an expert that occurs twice is counted once.
        self._cells[self._cells_of(ids_LN)] += self._worth * self._learns
        self._cells[-1] = 0.0
        self._steps += 1
        if self._steps >= self._rebase_steps:
            self._rebase()

    def read(self, layer: int, ids_TK: IntArray) -> None:
        decay = float(self._decay[layer, 0])
        num_experts = int(self.num_experts[layer])
        score = self._score[layer, :num_experts]
        score *= decay ** len(ids_TK)
        uses = faded_uses(ids_TK, num_experts, decay)
        score += self._worth[layer, 0] * self._learns[layer, 0] * uses

    def _standing(self) -> tuple[FloatArray, FloatArray]:
        worth = self._worth / self._decay
        score = self._score if self._prior is None else self._score + worth * self._prior
        return score, worth * self._learns

    def _rebase(self) -> None:
        """Brings the worth of a use back to 1; what has faded to nothing becomes 0."""
        self._score /= self._worth
        self._score[self._score < 2.0**-_REBASE_BITS] = 0.0
        self._worth[:] = 1.0
        self._steps = 0


class Lru(ScoredPolicy):
    """Least recently used: whoever is used gets the slot whose expert waited longest."""

    name = "lru"

    def __init__(
        self,
        num_experts: Sequence[int],
        *,
        prior_LE: FloatArray | None = None,
        num_victims: int = NUM_VICTIMS,
    ) -> None:
        super().__init__(num_experts, prior_LE=prior_LE, num_victims=num_victims)
        self._clock = np.zeros((self.shape[0], 1))

    def observe(self, ids_LN: IntArray) -> None:
        self._clock += 1.0
        cells = self._cells_of(ids_LN)
        self._cells[cells] = np.broadcast_to(self._clock, cells.shape)
        self._cells[-1] = 0.0

    def read(self, layer: int, ids_TK: IntArray) -> None:
        """As one step, in which later tokens ran later."""
        self._clock[layer] += 1.0
        num_tokens, num_experts = len(ids_TK), int(self.num_experts[layer])
        known = (ids_TK >= 0) & (ids_TK < num_experts)
        when = np.broadcast_to(np.arange(1, num_tokens + 1)[:, None] / num_tokens, ids_TK.shape)
        # Of several assignments to one cell the last one stays.
        self._score[layer, ids_TK[known]] = self._clock[layer] - 1.0 + when[known]

    def _standing(self) -> tuple[FloatArray, None]:
        return self._score, None


def lowest(score_LE: FloatArray, able_LE: BoolArray, num: int, *, scratch_LE: IntArray) -> IntArray:
    """Ids of the `num` lowest scores among those that are `able`, per layer in ascending order.

    Scores of at least 0 order like their bits, so the id goes into the lowest mantissa bits and
    one partition finds ids and order at once: equal scores are ordered by id on every machine.

    Args:
        scratch_LE: int64, overwritten.

    Returns:
        [L, num] int64, -1 where a layer has fewer.
    """
    cells_LC = _few_of_each(able_LE, num)
    if cells_LC is None:
        key = _all_keys(score_LE, able_LE, num, scratch_LE)
    else:
        key = score_LE.take(cells_LC).view(np.int64)
        key &= ~_ID_MASK
        key |= cells_LC - _first_cells(able_LE)
    take = min(num, key.shape[1])
    key.partition(take - 1, axis=1)
    found = key[:, :take]
    found.sort(axis=1)
    if take < num:
        found = np.pad(found, ((0, 0), (0, num - take)), constant_values=_NOT_A_VICTIM)
    return np.where(found == _NOT_A_VICTIM, -1, found & _ID_MASK)


def _few_of_each(able_LE: BoolArray, num: int) -> IntArray | None:
    """Flat cells of those that are able, [L, C], where every layer has as many and they are few:
    then the others need not be looked at. The usual case, as a fill only changes owners."""
    num_layers, width = able_LE.shape
    cells = np.flatnonzero(able_LE)
    count, rest = divmod(len(cells), num_layers)
    if rest or not num <= count <= width // 2:
        return None
    cells_LC = cells.reshape(num_layers, count)
    first_L = _first_cells(able_LE)[:, 0]
    even = (cells_LC[:, 0] >= first_L).all() and (cells_LC[:, -1] < first_L + width).all()
    return cells_LC if even else None


def _first_cells(array_LE: BoolArray) -> IntArray:
    """Flat cell of each layer's first expert, [L, 1]."""
    return np.arange(0, array_LE.size, array_LE.shape[1], dtype=np.int64)[:, None]


def _all_keys(score_LE: FloatArray, able_LE: BoolArray, num: int, scratch_LE: IntArray) -> IntArray:
    """Keys of whole layers, of wide ones those that can be among the lowest."""
    key = np.bitwise_and(score_LE.view(np.int64), ~_ID_MASK, out=scratch_LE)
    key |= np.arange(key.shape[1], dtype=np.int64)
    np.copyto(key, _NOT_A_VICTIM, where=~able_LE)
    num_layers, width = key.shape
    if width >= _TOURNAMENT_FROM and width % _COLUMNS == 0 and num < _COLUMNS:
        # The lowest `num` lie in the columns whose minima are among the lowest `num`.
        blocks = key.reshape(num_layers, width // _COLUMNS, _COLUMNS)
        heads = np.minimum.reduce(blocks, axis=1)
        columns = np.argpartition(heads, num - 1, axis=1)[:, None, :num]
        key = np.take_along_axis(blocks, columns, axis=2).reshape(num_layers, -1)
    return key


def _offer_spares(
    placement: Placement, victims: IntArray, value: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Puts empty slots, which every expert outranks, before the victims."""
    first = placement.pools.max_experts
    empty = placement.resident[:, first:]
    spares = np.where(empty, np.arange(first, first + placement.num_spare), -1)
    victims = np.concatenate([spares, victims], axis=1)
    value = np.concatenate([np.where(empty, -np.inf, np.inf), value], axis=1)
    order = np.argsort(value, axis=1, kind="stable")[:, : victims.shape[1] - placement.num_spare]
    return np.take_along_axis(victims, order, axis=1), np.take_along_axis(value, order, axis=1)
