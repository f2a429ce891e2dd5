"""A linear forecast of the experts that the next tokens use, fitted to a trace of one model.

Knows one layer at a time: the recent uses of all its experts tell more about one of them than its
own past does. Refuses to know tokens, text and hidden states.

With x(t) the experts used by token t (0 or 1 each) and d = 2^(-1/s) for a half-life of s tokens,

    u_s(t) = d u_s(t-1) + (1 - d) x(t)                         recent use
    y(t)   = (1 - g) (x(t+1) + g x(t+2) + g^2 x(t+3) + ...)    use to come, g = 2^(-1/HORIZON)

and y(t) is forecast from what is known before token t, and from whether t itself uses the expert:

    f(t) = a_2 u_2 + a_8 u_8 + a_64 u_64 + b x(t) + c p        of the expert itself, p its mean use
         + W_2 u_2 + W_8 u_8                                   of all experts of the layer

a, b and c are least squares over all experts and layers; W is ridge regression on what they leave,
layer by layer, with features scaled to unit variance and a penalty of PENALTY tokens, so that with
few tokens the forecast is nearly that of the expert itself. Fitted to text that is unlike what is
served, it can be worse than a half-life (docs/log.md): `hotset simulate` tells.

Letters: T tokens, L MoE layers, E experts of the widest layer, C tokens of a chunk, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.core.errors import CheckpointError
from hotset.core.slot_pools import IntArray
from hotset.core.trace import Trace

SHARED_HALF_LIVES = (2.0, 8.0)
"""Of the recent uses that all experts of a layer share. 1, 4 and 16 gain 0.002 more hits at most
and cost half as much again per step."""

OWN_HALF_LIFE = 64.0
"""Of the recent use that counts for the expert itself only."""

HORIZON = 4.0
PENALTY = 3000.0

_CHUNK = 512
_GROUP_BYTES = 512 * 2**20
_HALF_LIVES = np.array([*SHARED_HALF_LIVES, OWN_HALF_LIFE])
_NUM_SHARED = len(SHARED_HALF_LIVES)

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Forecast:
    """The fitted weights, in the form in which a policy adds them up.

    Attributes:
        shared_LEF: [L, E, 2 E] float32: what one use of an expert adds to the forecasts of all
            experts of its layer, for each of `SHARED_HALF_LIVES`; its own share (a) included.
        own_L: [L] what a use adds to the expert's own slow forecast.
        use_L: [L] b: what a use of this token adds.
        constant_LE: [L, E] the forecast without any use.
        num_tokens: fitted to.
    """

    shared_LEF: NDArray[np.float32]
    own_L: FloatArray
    use_L: FloatArray
    constant_LE: FloatArray
    num_tokens: int

    @classmethod
    def fit(cls, trace: Trace) -> Forecast:
        """Fits to all sequences of a trace, one after another.

        Memory: about 512 MiB, or 80 E^2 bytes if that is more.
        """
        width, layers = trace.max_experts, trace.num_layers
        per_layer = (3 * width) ** 2 * 8 + 6 * width**2 * 8 + _CHUNK * 40 * width
        group = max(1, min(layers, _GROUP_BYTES // per_layer))
        parts = []
        for first in range(0, layers, group):
            moments = _Moments(min(group, layers - first), width)
            for ids_TLK in trace:
                moments.add(ids_TLK[:, first : first + group])
            parts.append(moments.solve())
        shared, own, use, constant = (np.concatenate(part) for part in zip(*parts, strict=True))
        return cls(shared, own, use, constant, trace.num_tokens)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """For a numpy archive."""
        return {field.name: np.asarray(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], *, where: str) -> Forecast:
        """Reads what `to_arrays` gave.

        Raises:
            CheckpointError: an array is missing, or shapes contradict each other.
        """
        try:
            found = {field.name: arrays[field.name] for field in fields(cls)}
        except KeyError as error:
            raise CheckpointError(f"`{where}` has an incomplete forecast: no {error}") from error
        layers, width = found["constant_LE"].shape
        shapes = {
            "shared_LEF": (layers, width, _NUM_SHARED * width),
            "own_L": (layers,),
            "use_L": (layers,),
        }
        for name, shape in shapes.items():
            if found[name].shape != shape or not np.isfinite(found[name]).all():
                raise CheckpointError(f"`{where}` has a damaged forecast: `{name}`")
        num_tokens = int(found.pop("num_tokens"))
        return cls(**found, num_tokens=num_tokens)

    def repeat(self, copies: int) -> Forecast:
        """The same forecast for a model whose layers are repeated, for replays side by side."""
        return Forecast(
            np.tile(self.shared_LEF, (copies, 1, 1)),
            np.tile(self.own_L, copies),
            np.tile(self.use_L, copies),
            np.tile(self.constant_LE, (copies, 1)),
            self.num_tokens,
        )


class _Moments:
    """Sums over tokens of products of features and targets, for some layers.

    The sum of u(t) y(t) needs the future of t; it equals the sum of v(t) x(t) with v the decayed
    past of u, and so one pass forward is enough.
    """

    def __init__(self, num_layers: int, width: int) -> None:
        self.shape, self.num_tokens = (num_layers, width), 0
        features = 3 * width
        self.uu = np.zeros((num_layers, features, features))
        self.ux = np.zeros((num_layers, features, width))
        self.uy = np.zeros((num_layers, features, width))
        self.u = np.zeros((num_layers, features))
        self.x, self.y, self.xy = (np.zeros((num_layers, width)) for _ in range(3))
        self._u = np.zeros((num_layers, 3, width), dtype=np.float32)
        self._past_u = np.zeros_like(self._u)
        self._past_x = np.zeros((num_layers, width), dtype=np.float32)
        self._past_one = 0.0

    def add(self, ids_TLK: IntArray) -> None:
        """Takes in one sequence."""
        for first in range(0, len(ids_TLK), _CHUNK):
            x_CLE = _used(ids_TLK[first : first + _CHUNK], self.shape[1])
            u_CLF, past_CLF, past_x_CLE, past_one_C = self._run(x_CLE)
            by_layer = u_CLF.transpose(1, 2, 0)
            self.uu += by_layer @ u_CLF.transpose(1, 0, 2)
            self.ux += by_layer @ x_CLE.transpose(1, 0, 2)
            self.uy += past_CLF.transpose(1, 2, 0) @ x_CLE.transpose(1, 0, 2)
            self.u += u_CLF.sum(axis=0)
            self.x += x_CLE.sum(axis=0)
            self.y += np.tensordot(past_one_C, x_CLE, axes=1)
            self.xy += (past_x_CLE * x_CLE).sum(axis=0)
            self.num_tokens += len(x_CLE)

    def _run(self, x_CLE: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
        """Features of each token before it is known, and their decayed past."""
        decay = np.exp2(-1 / _HALF_LIVES).astype(np.float32)[:, None]
        keep = np.float32(2 ** (-1 / HORIZON))
        u = np.empty((len(x_CLE), *self._u.shape), dtype=np.float32)
        past_u, past_x = np.empty_like(u), np.empty_like(x_CLE)
        past_one = np.empty(len(x_CLE), dtype=np.float32)
        for token, x_LE in enumerate(x_CLE):
            u[token], past_u[token], past_x[token] = self._u, self._past_u, self._past_x
            past_one[token] = self._past_one
            self._past_u = keep * self._past_u + (1 - keep) * self._u
            self._past_x = keep * self._past_x + (1 - keep) * x_LE
            self._past_one = float(keep * self._past_one + (1 - keep))
            self._u = decay * self._u + (1 - decay) * x_LE[:, None]
        flat = (len(x_CLE), self.shape[0], -1)
        return u.reshape(flat), past_u.reshape(flat), past_x, past_one

    def solve(self) -> tuple[NDArray[np.float32], FloatArray, FloatArray, FloatArray]:
        """Weights of these layers: see the attributes of `Forecast`."""
        num_layers, width = self.shape
        own, use, mean_weight = self._solve_own()
        mean_use = self.x / self.num_tokens
        rise = 1 - np.exp2(-1 / _HALF_LIVES)
        shared = np.zeros((num_layers, width, _NUM_SHARED, width), dtype=np.float32)
        constant = mean_weight * mean_use
        for layer in range(num_layers):
            weight_FE, shift_E = self._solve_shared(layer, own, use)
            constant[layer] -= shift_E
            blocks = weight_FE.reshape(_NUM_SHARED, width, width)
            blocks = blocks + own[:_NUM_SHARED, None, None] * np.eye(width)
            shared[layer] = (rise[:_NUM_SHARED, None, None] * blocks).transpose(1, 0, 2)
        return (
            shared.reshape(num_layers, width, -1),
            np.full(num_layers, own[_NUM_SHARED] * rise[_NUM_SHARED]),
            np.full(num_layers, use),
            constant,
        )

    def _solve_own(self) -> tuple[FloatArray, float, float]:
        """(a), b and c: least squares over all experts of these layers."""
        width, mean_use = self.shape[1], self.x / self.num_tokens
        blocks = [slice(i * width, (i + 1) * width) for i in range(3)]
        uu = [[_traces(self.uu[:, i, j]) for j in blocks] for i in blocks]
        ux = [_traces(self.ux[:, i]) for i in blocks]
        up = [float((self.u[:, i] * mean_use).sum()) for i in blocks]
        uses, use_p = self.x.sum(), float((self.x * mean_use).sum())
        left = np.array(
            [[*uu[i], ux[i], up[i]] for i in range(3)]
            + [[*ux, uses, use_p], [*up, use_p, self.num_tokens * (mean_use**2).sum()]]
        )
        uy = [_traces(self.uy[:, i]) for i in blocks]
        right = np.array([*uy, self.xy.sum(), (mean_use * self.y).sum()])
        # Even use of all experts makes columns equal; of the solutions the smallest is taken.
        found = np.linalg.lstsq(left, right, rcond=1e-9)[0]
        return found[:3], float(found[3]), float(found[4])

    def _solve_shared(
        self, layer: int, own: FloatArray, use: float
    ) -> tuple[FloatArray, FloatArray]:
        """W [2 E, E] of a layer, and what it forecasts at mean features, [E]."""
        width, num = self.shape[1], _NUM_SHARED * self.shape[1]
        uu, mean = self.uu[layer], self.u[layer] / self.num_tokens
        covariance = uu[:num, :num] - self.num_tokens * np.outer(mean[:num], mean[:num])
        scale = np.sqrt(np.maximum(np.diag(covariance) / self.num_tokens, 1e-12))
        left = covariance / np.outer(scale, scale) + PENALTY * np.eye(num)
        explained = use * (self.ux[layer, :num] - np.outer(mean[:num], self.x[layer]))
        for index, weight in enumerate(own):
            block = slice(index * width, (index + 1) * width)
            centred = uu[:num, block] - np.outer(mean[:num], self.u[layer, block])
            explained = explained + weight * centred
        target = self.uy[layer, :num] - np.outer(mean[:num], self.y[layer])
        weight_FE = np.linalg.solve(left, (target - explained) / scale[:, None]) / scale[:, None]
        return weight_FE, mean[:num] @ weight_FE


def _used(ids_CLK: IntArray, width: int) -> NDArray[np.float32]:
    """[C, L, E] 1 for the experts that a token uses; padded ids use none."""
    used = np.zeros((*ids_CLK.shape[:2], width + 1), dtype=np.float32)
    np.put_along_axis(used, np.where(ids_CLK < 0, width, ids_CLK), 1, axis=2)
    return np.ascontiguousarray(used[:, :, :width])


def _traces(blocks_LEE: FloatArray) -> float:
    return float(np.trace(blocks_LEE, axis1=1, axis2=2).sum())
