"""What a policy is: it sees routed ids, and says who should own a slot.

The runtime, the simulator and the tests use the same objects. A policy knows layers, experts and
counts; it refuses to know devices, bytes and time. It never moves anything: it wishes, and the
match rule of `core.placement` decides within the step.

Letters: L MoE layers, E experts of the widest layer, N routed ids of a layer in one step,
V victims.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hotset.core.errors import ConfigError
from hotset.core.placement import Placement
from hotset.core.slot_pools import BoolArray, IntArray, SlotPools

FloatArray = NDArray[np.float64]

NUM_VICTIMS = 8
"""V. 4 are enough at batch 1 and top-4 (core/simulator measures it); 8 costs nothing more."""


MAX_VICTIMS = 127
"""Places that the match rule of `core.placement` has."""


@dataclass(frozen=True)
class Wishes:
    """What the device may change in a step.

    Attributes:
        victims_LV: int32, residents of the layer worst first, each once, -1 for none.
        admit_LE: int32, how many leading victims an expert would outrank if it were used now.
    """

    victims_LV: NDArray[np.int32]
    admit_LE: NDArray[np.int32]

    @classmethod
    def none(cls, num_layers: int, num_victims: int, num_experts: int) -> Wishes:
        """Wishes that change nothing."""
        return cls(
            np.full((num_layers, num_victims), -1, dtype=np.int32),
            np.zeros((num_layers, num_experts), dtype=np.int32),
        )


class Policy(ABC):
    """Decides which experts should own slots.

    A step is `wishes` (before it), then `observe` (its routed ids, when the host learns them).
    Wishes may be older than the last observed step: the device checks residency itself.

    Args:
        num_experts: experts of each layer, length L.
        prior_LE: [L, E], uses per step expected of each expert (a profile's counts per token),
            `None` when nothing is known.
        num_victims: V.

    Raises:
        ConfigError: a prior of the wrong shape or with negative values, or V outside 1..127.
    """

    name: ClassVar[str]
    moves: ClassVar[bool] = True
    """Whether it ever wishes for anything; the device need not match for one that never does."""
    needs_prior: ClassVar[bool] = False
    """Whether `initial` means nothing without a prior."""

    def __init__(
        self,
        num_experts: Sequence[int],
        *,
        prior_LE: FloatArray | None = None,
        num_victims: int = NUM_VICTIMS,
    ) -> None:
        if not 1 <= num_victims <= MAX_VICTIMS:
            raise ConfigError(f"`num_victims` is {num_victims}, it must be in 1..{MAX_VICTIMS}")
        self.num_experts = np.asarray(num_experts, dtype=np.int64)
        self.num_victims = num_victims
        self.shape = (len(num_experts), int(max(num_experts)))
        if prior_LE is not None:
            prior_LE = np.asarray(prior_LE, dtype=np.float64)
            if prior_LE.shape != self.shape or not (prior_LE >= 0).all():
                raise ConfigError(
                    f"the prior has shape {prior_LE.shape}, the model {self.shape}; "
                    "it must hold one value of at least 0 per layer and expert"
                )
        self.prior_LE = prior_LE

    def check_ready(self) -> None:
        """Makes sure that `initial` will have what it needs.

        Raises:
            ConfigError: it needs a profile and has none.
        """
        if self.needs_prior and self.prior_LE is None:
            raise ConfigError(
                f"policy `{self.name}` needs a profile",
                hint="use `half-life`, which needs none",
            )

    def initial(self, pools: SlotPools, *, slots_per_layer: IntArray | None = None) -> BoolArray:
        """Experts that should own a slot before anything was routed, [L, E] bool.

        The experts of highest prior in each layer; the first ones where nothing is known.

        Args:
            slots_per_layer: [L]; `None` spreads each pool evenly over its layers.
        """
        return self.best_experts(
            pools.split_evenly() if slots_per_layer is None else slots_per_layer
        )

    def best_experts(self, slots_per_layer: IntArray) -> BoolArray:
        """The `slots_per_layer` experts of highest prior in each layer, [L, E] bool."""
        scores = np.zeros(self.shape) if self.prior_LE is None else self.prior_LE
        return top_experts(scores, self.num_experts, slots_per_layer)

    @abstractmethod
    def observe(self, ids_LN: IntArray) -> None:
        """Takes in one engine step.

        Args:
            ids_LN: routed ids of all tokens of the step. An expert counts once however many
                tokens used it; ids outside 0..E-1 (padding) not at all.
        """

    @abstractmethod
    def read(self, layer: int, ids_TK: IntArray) -> None:
        """Takes in a prompt's routing in one layer, as one step for each of its tokens.

        Args:
            layer: MoE layer.
            ids_TK: routed ids, tokens in order; ids outside 0..E-1 are padding.
        """

    @abstractmethod
    def scores(self, layer: int) -> FloatArray:
        """[E]: who deserves a slot, as things stand; higher is better."""

    @abstractmethod
    def wishes(self, placement: Placement, *, out: Wishes | None = None) -> Wishes:
        """Wishes for the next step, in `out` (overwritten) or in fresh arrays."""

    def _buffers(self, out: Wishes | None) -> Wishes:
        num_layers, num_experts = self.shape
        return out or Wishes.none(num_layers, self.num_victims, num_experts)


def faded_uses(ids_TK: IntArray, num_experts: int, decay: float) -> FloatArray:
    """Uses of each expert by T tokens, of which the last counts 1 and one t before it decay^t.

    An expert counts once a token. Tokens that count less than 2^-40 are left out.

    Returns:
        [E] float64.
    """
    num_tokens = len(ids_TK)
    if decay < 1:
        num_tokens = min(num_tokens, int(np.ceil(-40 / np.log2(decay))))
    ids = np.sort(ids_TK[len(ids_TK) - num_tokens :], axis=1)
    counts = (ids >= 0) & (ids < num_experts)
    counts[:, 1:] &= ids[:, 1:] != ids[:, :-1]
    weight_T1 = decay ** np.arange(num_tokens - 1, -1, -1, dtype=np.float64)[:, None]
    weight = np.broadcast_to(weight_T1, ids.shape)[counts]
    return np.bincount(ids[counts], weights=weight, minlength=num_experts).astype(np.float64)


def top_experts(scores_LE: FloatArray, num_experts: IntArray, slots_L: IntArray) -> BoolArray:
    """Marks the `slots_L[l]` highest scores of each layer, lower ids first among equals."""
    beyond = np.arange(scores_LE.shape[1]) >= num_experts[:, None]
    order = np.argsort(np.where(beyond, np.inf, -scores_LE), axis=1, kind="stable")
    marked = np.zeros(scores_LE.shape, dtype=np.bool_)
    within = np.arange(scores_LE.shape[1]) < np.minimum(slots_L, num_experts)[:, None]
    np.put_along_axis(marked, order, within, axis=1)
    return marked
